"""Models that differ from Llama in their feed-forward block, which is a mixture of experts:

Mixtral     every layer, weights of the chosen experts divided by their sum (Jiang et al. 2024)
Qwen2-MoE   some layers, and shared experts with a gate for every token (Yang et al. 2024)
Qwen3-MoE   some layers, without shared experts (Yang et al. 2025)
OLMoE       every layer; queries and keys are normalized as a whole (Muennighoff et al. 2024)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Build, Experts, Linear, RouterRule, read, size_of
from pegboard_model_llama.llama import FeedForward, LlamaModel, Shape


class MixtralModel(LlamaModel):
    def feed_forward(
        self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        rule = RouterRule(size_of(config, "num_experts_per_tok"), renormalize=True)
        block = build.at("block_sparse_moe")
        experts = make_experts(
            block,
            shape,
            number_of_experts(config),
            shape.intermediate_size,
            rule,
            ("w1", "w3", "w2"),
        )
        return ExpertsBlock(block, experts)


class QwenMoeModel(LlamaModel):
    """Qwen2-MoE and Qwen3-MoE."""

    def feed_forward(
        self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        dense: Any = read(config, "mlp_only_layers", list) or []
        every = read(config, "decoder_sparse_step", int) or 1
        block = build.at("mlp")
        if index in dense or (index + 1) % every:
            return FeedForward(block, shape)
        rule = RouterRule(
            size_of(config, "num_experts_per_tok"),
            renormalize=bool(read(config, "norm_topk_prob", bool)),
        )
        width = size_of(config, "moe_intermediate_size")
        experts = make_experts(block, shape, number_of_experts(config), width, rule)
        shared = read(config, "shared_expert_intermediate_size", int)
        return ExpertsBlock(
            block,
            experts,
            FeedForward(block.at("shared_expert"), shape, shared) if shared else None,
        )


class OlmoeModel(LlamaModel):
    def feed_forward(
        self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        if config.get("clip_qkv") is not None:
            raise ModelError(
                f"the checkpoint's config has clip_qkv={config['clip_qkv']!r}; this architecture "
                "is served without"
            )
        rule = RouterRule(
            size_of(config, "num_experts_per_tok"),
            renormalize=bool(read(config, "norm_topk_prob", bool)),
        )
        block = build.at("mlp")
        experts = make_experts(
            block, shape, number_of_experts(config), shape.intermediate_size, rule
        )
        return ExpertsBlock(block, experts)


def number_of_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts, which has two names: transformers 5 writes the second one for
    all models."""
    return read(config, "num_experts", int) or size_of(config, "num_local_experts")


def make_experts(
    build: Build,
    shape: Shape,
    num_experts: int,
    width: int,
    rule: RouterRule,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Experts:
    """Return the experts of a block. build: of the block. names: of their gate, up and down."""
    return Experts(
        build.at("experts"),
        num_experts,
        shape.hidden_size,
        width,
        rule=rule,
        activation=shape.activation,
        names=names,
    )


class ExpertsBlock(nn.Module):
    """[T, hidden] → [T, hidden]. shared: computes every token. Its results have a gate, a number
    for each token."""

    def __init__(self, build: Build, experts: Experts, shared: FeedForward | None = None) -> None:
        super().__init__()
        self.gate = Linear(
            build.at("gate"), experts.hidden_size, experts.num_experts, is_router=True
        )
        self.experts = experts
        self.shared_expert = shared
        self.shared_expert_gate = (
            Linear(build.at("shared_expert_gate"), experts.hidden_size, 1)
            if shared is not None
            else None
        )

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.gate(hidden)
        if self.shared_expert is None or self.shared_expert_gate is None:
            return self.experts(hidden, logits)
        return self.experts(
            hidden, logits, self.shared_expert.forward(hidden), self.shared_expert_gate(hidden)
        )
