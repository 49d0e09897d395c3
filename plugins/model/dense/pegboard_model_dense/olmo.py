"""OLMo. The first one has norms without weights (Groeneveld et al. 2024). OLMo 2 and 3 normalize
the results of blocks, and all queries and keys (OLMo Team 2024, 2025). FlexOlmo has experts (Shi et
al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pegboard.layers import LayerNorm, read, size_of
from pegboard_model_dense.architecture import Architecture, ExpertSizes, Names
from pegboard_model_dense.blocks import PostNorm
from pegboard_model_dense.config import (
    common,
    number_of_experts,
    ropes_of_types,
    rule_of,
    windows_by_type,
    with_experts,
)
from pegboard_model_dense.decoder import Decoder
from pegboard_models.norms import all_heads


class Olmo(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        bias = bool(read(config, "attention_bias", bool))
        limit = read(config, "clip_qkv", float)
        standard = {**config, "rms_norm_eps": 1e-5}
        return common(
            standard,
            norm=partial(LayerNorm, has_weight=False, has_bias=False),
            qkv_bias=bias,
            out_bias=bias,
            qkv_limit=limit,
        )


class Olmo2(Decoder):
    """Also OLMo 3, three of four layers of which have a window and rotate without scaling."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        bias = bool(read(config, "attention_bias", bool))
        names = Names(
            after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
        )
        model = common(
            {"rms_norm_eps": 1e-5, **config},
            names=names,
            block=PostNorm,
            head_norm=all_heads,
            qkv_bias=bias,
            out_bias=bias,
        )
        if config.get("model_type") != "olmo3":
            return model
        window = read(config, "sliding_window", int) or 4096
        layers = windows_by_type(config, model, window, lambda i: (i + 1) % 4 == 0)
        layers = tuple(replace(layer, rope=0 if layer.window is None else 1) for layer in layers)
        return replace(model, layers=layers, ropes=ropes_of_types(config, model, {"scaling": {}}))


class FlexOlmo(Olmo2):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        width = size_of(config, "intermediate_size")
        experts = ExpertSizes(
            count=number_of_experts(config), width=width, rule=rule_of(config, score="softmax")
        )
        base = {"rope_theta": 500_000.0, "rms_norm_eps": 1e-6, **config}
        return with_experts(Olmo2.architecture(base), experts)
