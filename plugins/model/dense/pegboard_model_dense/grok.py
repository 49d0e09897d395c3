"""Grok-1 (xAI 2024, github.com/xai-org/grok-1): experts with GELU, soft caps of scores, a norm
before and after each block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.layers import RouterRule, read, size_of
from pegboard_model_dense.decoder import Decoder
from pegboard_model_dense.experts import with_experts
from pegboard_model_dense.traits import ExpertTraits, LayerTraits, Names, Traits, common, refuse


class Grok(Decoder):
    """The weights of the chosen experts are their shares of all experts. The scale of scores is a
    value of the config."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        # both are of Grok-2
        refuse(config, {"residual_moe": False, "router_logit_softcapping": 0.0})
        names = Names(
            attention="attn",
            before_attention="pre_attn_norm",
            after_attention="post_attn_norm",
            before_mlp="pre_moe_norm",
            after_mlp="post_moe_norm",
        )
        own = {
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            **config,
            "hidden_act": "gelu_pytorch_tanh",
        }
        heads = size_of(config, "num_attention_heads")
        scale = read(config, "attn_output_multiplier", float) or 1.0
        layer = LayerTraits(
            read(config, "num_key_value_heads", int) or heads,
            size_of(config, "intermediate_size"),
            scale=scale,
        )
        traits = common(
            own,
            names=names,
            norm="rms, scale",
            layers=(layer,) * size_of(config, "num_hidden_layers"),
            soft_cap=read(config, "max_attn_value", float) or 30.0,
            embedding_scale=read(config, "embedding_multiplier_scale", float) or 1.0,
            logits_scale=read(config, "output_multiplier_scale", float) or 1.0,
        )
        experts = ExpertTraits(
            count=size_of(config, "num_experts"),
            width=layer.width,
            rule=RouterRule(size_of(config, "num_experts_per_tok")),
            router="moe_block.gate",
            modules="moe_block.experts",
            names=("linear", "linear_v", "linear_1"),
        )
        return with_experts(traits, experts)
