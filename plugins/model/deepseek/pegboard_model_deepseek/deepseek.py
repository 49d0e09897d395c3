"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): latent attention, and experts in all layers after the
first few.

V2   scores of experts by softmax; the best groups of experts are those with the best expert
V3   scores by sigmoid; groups by their two best experts, chosen with a correction that balances
their load
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pegboard.errors import ModelError
from pegboard.layers import Build, Experts, RouterRule, read, size_of
from pegboard_model_deepseek.decoder import LatentDecoder, LatentLayers, mlp
from pegboard_model_deepseek.shape import Shape, sparse_layers
from pegboard_models.blocks import ExpertsBlock


class DeepseekLayers(LatentLayers):
    """score, method: how experts are chosen if the config does not say it."""

    score = "softmax"
    method = "greedy"

    def feed_forward(
        self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        num_experts = read(config, "n_routed_experts", int)
        if not num_experts or not sparse_layers(config, shape.num_layers)[index]:
            return super().feed_forward(build, index, shape, config)
        rule = router_rule(config, num_experts, score=self.score, method=self.method)
        return experts_block(build.at("mlp"), shape, config, num_experts, rule)


class DeepseekV3Layers(DeepseekLayers):
    score = "sigmoid"
    method = "noaux_tc"


class DeepseekModel(DeepseekLayers, LatentDecoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build, Shape(config), pairs=has_pairs(config))


class DeepseekV2Model(DeepseekModel):
    pass


class DeepseekV3Model(DeepseekV3Layers, DeepseekModel):
    pass


def has_pairs(config: Mapping[str, Any]) -> bool:
    """Return whether channels that are rotated together are neighbors."""
    return read(config, "rope_interleave", bool) is not False


def router_rule(
    config: Mapping[str, Any], num_experts: int, *, score: str, method: str
) -> RouterRule:
    """Return how experts are chosen. score, method: if the config does not say it. Raises
    ModelError if the config names a method that is not known."""
    score = read(config, "scoring_func", str) or score
    method = read(config, "topk_method", str) or method
    best = {"greedy": 0, "group_limited_greedy": 1, "noaux_tc": 2}.get(method)
    if best is None or score not in ("softmax", "sigmoid"):
        message = "softmax or sigmoid, and greedy, group_limited_greedy or noaux_tc"
        raise ModelError(
            f"the checkpoint's config has scoring_func={score!r} and topk_method={method!r}; "
            f"expected {message}"
        )
    num_groups = (read(config, "n_group", int) or 1) if best else 1
    if num_groups > 1 and (num_experts % num_groups or num_experts // num_groups < best):
        raise ModelError(
            f"{num_experts} experts do not form n_group={num_groups} groups of at least {best}"
        )
    return RouterRule(
        top_k=size_of(config, "num_experts_per_tok"),
        score=score,  # type: ignore[arg-type]
        renormalize=bool(read(config, "norm_topk_prob", bool)),
        scale=read(config, "routed_scaling_factor", float) or 1.0,
        num_groups=num_groups,
        top_groups=read(config, "topk_group", int) or num_groups,
        group_best=best or 1,
    )


def experts_block(
    build: Build,
    shape: Shape,
    config: Mapping[str, Any],
    num_experts: int,
    rule: RouterRule,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> ExpertsBlock:
    """Return a block of chosen experts, and of shared ones that compute every token. names: of
    gate, up and down."""
    width = size_of(config, "moe_intermediate_size")
    num_shared = read(config, "n_shared_experts", int) or 0
    gate = build.at("gate")
    correction = f"{gate.path}.e_score_correction_bias" if rule.group_best == 2 else None
    experts = Experts(
        build.at("experts"),
        num_experts,
        shape.hidden_size,
        width,
        rule=rule,
        activation=shape.activation,
        names=names,
        correction=correction,
    )
    shared = mlp(build.at("shared_experts"), shape, width * num_shared) if num_shared else None
    return ExpertsBlock(gate, experts, shared)
