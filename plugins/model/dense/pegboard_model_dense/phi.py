"""Phi. 1 and 2: parallel blocks, biases everywhere, also in the head (Li et al. 2023). 3: merged
projections, LongRoPE. 3.5-MoE: LayerNorm, and experts chosen one after the other (Abdin et al.
2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.errors import ModelError
from pegboard.layers import LayerNorm, read, size_of
from pegboard_model_dense.architecture import Architecture, ExpertSizes, Names, Rotary
from pegboard_model_dense.blocks import Parallel, PlainMLP
from pegboard_model_dense.config import common, number_of_experts, refuse, windowed, with_experts
from pegboard_model_dense.decoder import Decoder
from pegboard_models.norms import each_head
from pegboard_models.sparse_mixer import SparseMixer


class Phi(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        names = Names(
            norm="model.final_layernorm",
            before_mlp="",
            out="dense",
            q_norm="q_layernorm",
            k_norm="k_layernorm",
            up=("fc1",),
            down="fc2",
        )
        standard = {
            "rms_norm_eps": read(config, "layer_norm_eps", float) or 1e-5,
            "hidden_act": "gelu_new",
            **config,
        }
        return common(
            standard,
            names=names,
            norm=LayerNorm,
            mlp=PlainMLP,
            block=Parallel,
            partial=0.5,
            bias=True,
            head_bias=not read(config, "tie_word_embeddings", bool),
            head_norm=each_head if read(config, "qk_layernorm", bool) else None,
        )


class Phi3(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        model = common(
            {"rms_norm_eps": 1e-5, **config}, names=Names(qkv=("qkv_proj",), up=("gate_up_proj",))
        )
        window = read(config, "sliding_window", int)
        return replace(
            model, layers=windowed(model, ["sliding_attention"] * len(model.layers), window)
        )


class PhiMoe(Decoder):
    """LayerNorm and biases, and experts that SparseMixer chooses."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(config, {"num_experts_per_tok": 2})
        base = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, **config}
        bias = bool(read(config, "attention_bias", bool))
        window = read(config, "sliding_window", int)
        model = common(
            base,
            norm=LayerNorm,
            qkv_bias=bias,
            out_bias=bias,
            head_bias=bool(read(config, "lm_head_bias", bool)),
        )
        jitter = read(config, "router_jitter_noise", float)
        experts = ExpertSizes(
            count=number_of_experts(config),
            width=size_of(config, "intermediate_size"),
            rule=SparseMixer(2, jitter=0.01 if jitter is None else jitter),
            router="block_sparse_moe.gate",
            modules="block_sparse_moe.experts",
            names=("w1", "w3", "w2"),
        )
        layers = windowed(model, ["sliding_attention"] * len(model.layers), window)
        return with_experts(
            replace(model, layers=layers, ropes=(_with_own_magnitude(model),)), experts
        )


def _with_own_magnitude(model: Architecture) -> Rotary:
    """Return the rotary embedding with Phi-3.5-MoE's factor of cos and sin, which belongs to the
    long or to the short factors of LongRoPE. Raises ModelError if the config does not have it."""
    rope = model.ropes[0]
    if rope.scaling.get("rope_type", rope.scaling.get("type", "default")) == "default":
        return rope
    original = read(rope.scaling, "original_max_position_embeddings", int) or model.max_positions
    name = "long_mscale" if model.max_positions > original else "short_mscale"
    magnitude = read(rope.scaling, name, float)
    if magnitude is None:
        raise ModelError(
            f"the checkpoint's config scales its rotary embedding without {name}; this "
            "architecture needs a number"
        )
    return replace(rope, scaling={**rope.scaling, "attention_factor": magnitude})
