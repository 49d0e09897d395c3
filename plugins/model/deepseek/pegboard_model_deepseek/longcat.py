"""LongCat-Flash (Meituan LongCat Team 2025): each layer has two latent attentions, two dense
feed-forward blocks, and one mixture of experts that bridges the second half of the layer. Some
experts of the mixture compute nothing: they return their input.

    x ─ attention ─┬─ feed-forward ─ attention ─ feed-forward ─ + ─
                   └─ experts ──────────────────────────────────┘     (norms and residual sums are
                   left out)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import (
    Build,
    Experts,
    Linear,
    Norm,
    Rotation,
    RouterRule,
    read,
    size_of,
)
from pegboard_model_deepseek.decoder import LatentDecoder, LatentSelfAttention, mlp
from pegboard_model_deepseek.shape import Shape
from pegboard_models.parameters import Parameters


class LongcatFlashModel(LatentDecoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build, Shape(standard(config)), pairs=True)

    def layer(self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]) -> nn.Module:
        return ShortcutLayer(build, index, shape, config)


def standard(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with DeepSeek-V3's names."""
    if read(config, "q_lora_rank", int) is None:
        raise ModelError(
            "the checkpoint's config has no q_lora_rank; LongCat-Flash needs a positive integer"
        )
    renamed = {
        "num_hidden_layers": size_of(config, "num_layers"),
        "intermediate_size": size_of(config, "ffn_hidden_size"),
    }
    return {**config, **renamed}


def scaled_attention(
    build: Build, index: int, shape: Shape, config: Mapping[str, Any]
) -> LatentSelfAttention:
    """Return the attention of half a layer, whose small vectors have factors of their sizes."""
    assert shape.q_rank is not None
    grown = {
        name: read(config, name, bool) is not False
        for name in ("mla_scale_q_lora", "mla_scale_kv_lora")
    }
    scale = shape.scale(config)
    scale *= (shape.hidden_size / shape.q_rank) ** 0.5 if grown["mla_scale_q_lora"] else 1.0
    latent_scale = (shape.hidden_size / shape.rank) ** 0.5 if grown["mla_scale_kv_lora"] else 1.0
    return LatentSelfAttention(build, index, shape, scale, pairs=True, latent_scale=latent_scale)


class ShortcutLayer(nn.Module):
    """Two halves, each attention and feed-forward after a norm. The experts read what the first
    feed-forward block reads, and their result is added at the end."""

    def __init__(self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]) -> None:
        super().__init__()

        def norms(name: str) -> list[Norm]:
            return [
                Norm(build.at(f"{name}.{half}"), shape.hidden_size, shape.eps) for half in (0, 1)
            ]

        self.first, self.second = (
            scaled_attention(build.at(f"self_attn.{half}"), 2 * index + half, shape, config)
            for half in (0, 1)
        )
        self.before = norms("input_layernorm")
        self.between = norms("post_attention_layernorm")
        self.mlps = [mlp(build.at(f"mlps.{half}"), shape) for half in (0, 1)]
        self.experts = ZeroExpertsBlock(build.at("mlp"), shape, config)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.before[0].add(hidden, residual)
        hidden, residual = self.between[0].add(self.first.forward(hidden, rotation), residual)
        shortcut = self.experts.forward(hidden)
        hidden, residual = self.before[1].add(self.mlps[0].forward(hidden), residual)
        hidden, residual = self.between[1].add(self.second.forward(hidden, rotation), residual)
        return self.mlps[1].forward(hidden) + shortcut, residual


class ZeroExpertsBlock(nn.Module):
    """[T, hidden] → [T, hidden]: the router chooses among experts and, after them, zero experts,
    which return their input."""

    def __init__(self, build: Build, shape: Shape, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.num_experts = size_of(config, "n_routed_experts")
        num_zero = read(config, "zero_expert_num", int) or 0
        kind = read(config, "zero_expert_type", str) or "identity"
        if kind != "identity" or num_zero < 0 or read(config, "router_bias", bool):
            values = (
                f"zero_expert_type={kind!r}, zero_expert_num={num_zero} and "
                f"router_bias={config.get('router_bias')}"
            )
            raise ModelError(
                f"the checkpoint's config has {values}; expected 'identity', no negative number "
                "and no bias"
            )
        total = self.num_experts + num_zero
        top_k = size_of(config, "moe_topk")
        if top_k > total:
            raise ModelError(
                f"the checkpoint's config has moe_topk={top_k}, but only {total} experts with the "
                "zero experts"
            )
        router = build.at("router")
        self.classifier = Linear(router.at("classifier"), shape.hidden_size, total, is_router=True)
        self.correction = Parameters(router, {"e_score_correction_bias": (total,)}, "float32")
        self.rule = RouterRule(top_k, scale=read(config, "routed_scaling_factor", float) or 1.0)
        self.route = build.kernels["route"]
        self.separate = build.kernels["zero_experts"]
        width = size_of(config, "expert_ffn_hidden_size")
        path = build.at("experts")
        self.experts = Experts(
            path, self.num_experts, shape.hidden_size, width, rule=None, activation=shape.activation
        )

    def forward(self, hidden: Tensor) -> Tensor:
        weights, ids = self.route(
            self.classifier(hidden), self.rule, self.correction["e_score_correction_bias"]
        )
        weights, ids, kept = self.separate(weights, ids, self.num_experts)
        out: Tensor = self.experts(hidden, weights, ids, hidden * kept.to(hidden.dtype))
        return out
