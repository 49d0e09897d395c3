"""Grok-1 (xAI 2024, github.com/xai-org/grok-1): experts with GELU, soft caps of scores, a norm
before and after each block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.interfaces.weight_loader import WantedWeight
from pegboard.layers import Norm, RouterRule, read, size_of
from pegboard.layers.build import PlainTensor
from pegboard_model_dense.architecture import Architecture, ExpertSizes, LayerSizes, Names
from pegboard_model_dense.config import common, refuse, with_experts
from pegboard_model_dense.decoder import Decoder


class ScaleNorm(Norm):
    """A Norm whose weight may be called scale."""

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        names = [f"{self.build.path}.{part}" for part in ("weight", "scale")]
        name = next((name for name in names if name in available), names[0])
        self.weight = PlainTensor({name: (0, self.size)}, (self.size,), self.build)
        return [WantedWeight(name, (self.size,))]


class Grok(Decoder):
    """The weights of the chosen experts are their shares of all experts. The scale of scores is a
    value of the config."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        # both are of Grok-2
        refuse(config, {"residual_moe": False, "router_logit_softcapping": 0.0})
        names = Names(
            attention="attn",
            before_attention="pre_attn_norm",
            after_attention="post_attn_norm",
            before_mlp="pre_moe_norm",
            after_mlp="post_moe_norm",
        )
        standard = {
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            **config,
            "hidden_act": "gelu_pytorch_tanh",
        }
        heads = size_of(config, "num_attention_heads")
        scale = read(config, "attn_output_multiplier", float) or 1.0
        layer = LayerSizes(
            read(config, "num_key_value_heads", int) or heads,
            size_of(config, "intermediate_size"),
            scale=scale,
        )
        model = common(
            standard,
            names=names,
            norm=ScaleNorm,
            layers=(layer,) * size_of(config, "num_hidden_layers"),
            soft_cap=read(config, "max_attn_value", float) or 30.0,
            embedding_scale=read(config, "embedding_multiplier_scale", float) or 1.0,
            logits_scale=read(config, "output_multiplier_scale", float) or 1.0,
        )
        experts = ExpertSizes(
            count=size_of(config, "num_experts"),
            width=layer.width,
            rule=RouterRule(size_of(config, "num_experts_per_tok")),
            router="moe_block.gate",
            modules="moe_block.experts",
            names=("linear", "linear_v", "linear_1"),
        )
        return with_experts(model, experts)
