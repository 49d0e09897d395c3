"""ERNIE 4.5 (Baidu 2025): rotates pairs; softmax scores of experts with a correction, shared
experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.layers import read, size_of
from pegboard_model_dense.architecture import Architecture, ExpertSizes
from pegboard_model_dense.config import common, number_of_experts, rule_of, with_experts
from pegboard_model_dense.decoder import Decoder


class Ernie(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        bias = bool(read(config, "use_bias", bool))
        base = {
            "tie_word_embeddings": True,
            "rope_theta": 500_000.0,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            **config,
        }
        return common(base, pairs=True, bias=bias)


class ErnieMoe(Ernie):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        base = {"head_dim": None, **config}
        model = Ernie.architecture(base)
        width = size_of(config, "moe_intermediate_size")
        first = read(config, "moe_layer_start_index", int) or 0
        every = read(config, "moe_layer_interval", int) or 1
        last = read(config, "moe_layer_end_index", int)
        last = len(model.layers) - 1 if last is None or last < 0 else last
        experts = ExpertSizes(
            count=number_of_experts(config),
            width=width,
            rule=rule_of(
                config, score="softmax", renormalize=True, top_k=read(config, "moe_k", int)
            ),
            correction="mlp.moe_statics.e_score_correction_bias",
            shared_width=width * (read(config, "moe_num_shared_experts", int) or 0),
        )
        model = replace(model, head_bias=bool(read(config, "use_bias", bool)))
        return with_experts(
            model, experts, lambda index: first <= index <= last and (index + 1) % every == 0
        )
