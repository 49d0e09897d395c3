"""openPangu-Ultra-MoE (Huawei 2025): DeepSeek-V3 without groups and correction, whose blocks also
have a norm of their result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pegboard.layers import Build, Norm, read
from pegboard_model_deepseek.deepseek import DeepseekLayers, DeepseekModel
from pegboard_model_deepseek.shape import Shape
from pegboard_models.blocks import PreNorm

NAMES = {
    "q_lora_rank": "attention_q_lora_dim",
    "kv_lora_rank": "attention_kv_lora_dim",
    "qk_nope_head_dim": "attention_qk_dim",
    "qk_rope_head_dim": "attention_qk_rope_dim",
    "v_head_dim": "attention_v_dim",
    "n_routed_experts": "num_routed_experts",
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "num_dense_layers",
}
"""What this architecture calls values of DeepSeek-V3's config. Some of its configs have DeepSeek's
names."""


class PanguLayers(DeepseekLayers):
    score = "sigmoid"
    method = "greedy"

    def layer(self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]) -> nn.Module:
        if not read(config, "sandwich_norm", bool):
            return super().layer(build, index, shape, config)

        def norm(name: str) -> Norm:
            return Norm(build.at(name), shape.hidden_size, shape.eps)

        attention = self.attention(build.at("self_attn"), index, shape, config)
        feed_forward = self.feed_forward(build, index, shape, config)
        return PreNorm(
            (norm("input_layernorm"), attention, norm("post_attention_layernorm")),
            (norm("pre_mlp_layernorm"), feed_forward, norm("post_mlp_layernorm")),
        )


class PanguUltraMoEModel(PanguLayers, DeepseekModel):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(standard(config), build)


def standard(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with DeepSeek-V3's names."""
    renamed = {
        name: config[name_in_config]
        for name, name_in_config in NAMES.items()
        if name_in_config in config
    }
    return {**config, **renamed}
