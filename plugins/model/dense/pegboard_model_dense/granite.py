"""Granite (IBM 2024): four factors, and experts with a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.layers import read, size_of
from pegboard_model_dense.architecture import Architecture, ExpertSizes
from pegboard_model_dense.config import common, number_of_experts, rule_of, with_experts
from pegboard_model_dense.decoder import Decoder


class Granite(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        bias = bool(read(config, "attention_bias", bool))
        model = common({"tie_word_embeddings": False, **config}, qkv_bias=bias, out_bias=bias)
        scale = read(config, "attention_multiplier", float)
        mlp_bias = bool(read(config, "mlp_bias", bool))
        return replace(
            model,
            up_bias=mlp_bias,
            down_bias=mlp_bias,
            layers=tuple(
                replace(layer, scale=1.0 if scale is None else scale) for layer in model.layers
            ),
            embedding_scale=read(config, "embedding_multiplier", float) or 1.0,
            residual_scale=read(config, "residual_multiplier", float) or 1.0,
            logits_scale=1 / (read(config, "logits_scaling", float) or 1.0),
        )


class GraniteMoe(Granite):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        model = Granite.architecture(config)
        experts = ExpertSizes(
            count=number_of_experts(config),
            width=size_of(config, "intermediate_size"),
            rule=rule_of(config, score="softmax", renormalize=True),
            router="block_sparse_moe.router.layer",
            modules="block_sparse_moe",
            names=("gate_proj", "up_proj", "output_linear"),
            merged="input_linear",
            shared="shared_mlp",
            shared_width=read(config, "shared_intermediate_size", int) or 0,
        )
        names = replace(model.names, up=("input_linear",), down="output_linear")
        return with_experts(replace(model, names=names), experts)
