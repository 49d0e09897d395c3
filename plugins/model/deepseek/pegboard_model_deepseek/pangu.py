"""openPangu-Ultra-MoE (Huawei 2025): DeepSeek-V3 without groups and correction, whose blocks also
have a norm of their result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.layers import Build, Norm, Rotation, read
from pegboard_model_deepseek.decoder import SelfAttention
from pegboard_model_deepseek.deepseek import DeepseekModel
from pegboard_model_deepseek.shape import Shape

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


class PanguUltraMoEModel(DeepseekModel):
    score = "sigmoid"
    method = "greedy"

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(
            {**config, **{name: config[own] for name, own in NAMES.items() if own in config}}, build
        )

    def layer(self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]) -> nn.Module:
        if not read(config, "sandwich_norm", bool):
            return super().layer(build, index, shape, config)
        attention = SelfAttention(
            build.at("self_attn"), index, shape, shape.scale(config), self.pairs
        )
        return SandwichLayer(
            build, shape, attention, self.feed_forward(build.at("mlp"), index, shape, config)
        )


class SandwichLayer(nn.Module):
    """Attention and feed-forward, each between two norms (Ding et al. 2021, "CogView"). `residual`
    is the sum of their results so far."""

    def __init__(
        self, build: Build, shape: Shape, attention: nn.Module, feed_forward: nn.Module
    ) -> None:
        super().__init__()

        def norm(name: str) -> Norm:
            return Norm(build.at(name), shape.hidden_size, shape.eps)

        self.before = norm("input_layernorm")
        self.after = norm("post_attention_layernorm")
        self.mlp_before = norm("pre_mlp_layernorm")
        self.mlp_after = norm("post_mlp_layernorm")
        self.self_attn = attention
        self.mlp = feed_forward

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.before.add(hidden, residual)
        hidden = self.after(self.self_attn.forward(hidden, rotation))
        hidden, residual = self.mlp_before.add(hidden, residual)
        return self.mlp_after(self.mlp.forward(hidden)), residual
