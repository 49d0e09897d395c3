"""Arcee: squared ReLU without a gate. AFMoE (Trinity): sigmoid scores, gated attention, windows,
layers without rotation (Arcee 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.layers import RouterRule, read, size_of
from pegboard_model_dense.architecture import Architecture, ExpertSizes, Names
from pegboard_model_dense.blocks import PlainMLP
from pegboard_model_dense.config import (
    common,
    number_of_experts,
    refuse,
    windows_by_type,
    with_experts,
)
from pegboard_model_dense.decoder import Decoder
from pegboard_models.norms import each_head


class Arcee(Decoder):
    """Squared ReLU without a gate."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        bias = bool(read(config, "attention_bias", bool))
        mlp_bias = bool(read(config, "mlp_bias", bool))
        base = {"hidden_act": "relu2", "rms_norm_eps": 1e-5, **config}
        return common(
            base,
            names=Names(up=("up_proj",)),
            mlp=PlainMLP,
            qkv_bias=bias,
            out_bias=bias,
            up_bias=mlp_bias,
            down_bias=mlp_bias,
        )


class Afmoe(Decoder):
    """Attention's results have a gate. Most layers have a window, and only these rotate."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(config, {"score_func": "sigmoid", "n_group": 1, "topk_group": 1})
        names = Names(
            after_attention="post_attention_layernorm",
            before_mlp="pre_mlp_layernorm",
            after_mlp="post_mlp_layernorm",
            gate="gate_proj",
        )
        bias = bool(read(config, "attention_bias", bool))
        base = {"head_dim": 128, "rms_norm_eps": 1e-5, **config}
        model = common(base, names=names, head_norm=each_head, qkv_bias=bias, out_bias=bias)
        every = read(config, "global_attn_every_n_layers", int) or 4
        window = read(config, "sliding_window", int) or 1024
        layers = windows_by_type(config, model, window, lambda i: (i + 1) % every == 0)
        scale = read(config, "route_scale", float)
        dense = read(config, "num_dense_layers", int)
        width = size_of(config, "moe_intermediate_size")
        experts = ExpertSizes(
            count=number_of_experts(config),
            width=width,
            rule=RouterRule(
                size_of(config, "num_experts_per_tok"),
                "sigmoid",
                renormalize=read(config, "route_norm", bool) is not False,
                scale=1.0 if scale is None else scale,
            ),
            router="mlp.router.gate",
            correction="mlp.expert_bias",
            shared_width=width * (read(config, "num_shared_experts", int) or 0),
        )
        model = replace(
            model,
            layers=tuple(replace(each, rope=None if each.window is None else 0) for each in layers),
            embedding_scale=model.hidden_size**0.5 if read(config, "mup_enabled", bool) else 1.0,
        )
        return with_experts(model, experts, lambda index: index >= (1 if dense is None else dense))
