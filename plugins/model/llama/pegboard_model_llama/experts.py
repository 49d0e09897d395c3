"""Models that differ from Llama in their feed-forward block, which is a mixture of experts:

Mixtral     every layer, weights of the chosen experts divided by their sum (Jiang et al. 2024)
Qwen2-MoE   some layers, and shared experts with a gate for every token (Yang et al. 2024)
Qwen3-MoE   some layers, without shared experts (Yang et al. 2025)
OLMoE       every layer; queries and keys are normalized as a whole (Muennighoff et al. 2024)
Aria        every layer, and shared experts without a gate (Li et al. 2024)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from pegboard.errors import ModelError
from pegboard.layers import Build, Experts, RouterRule, read, size_of
from pegboard_model_llama.llama import LlamaModel, Qwen3Model, Shape, mlp
from pegboard_models.blocks import ExpertsBlock
from pegboard_models.norms import HeadNorm, all_heads

TRANSPOSED = ("qwen3_vl_moe_text",)
"""The model types of which some checkpoints have stacked experts as [E, in, out]."""


class MixtralModel(LlamaModel):
    @staticmethod
    def feed_forward(
        build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        block = build.at("block_sparse_moe")
        rule = RouterRule(size_of(config, "num_experts_per_tok"), renormalize=True)
        return ExpertsBlock(
            block.at("gate"), make_experts(block, shape, config, rule, names=("w1", "w3", "w2"))
        )


class Qwen3MoeModel(Qwen3Model):
    @staticmethod
    def feed_forward(
        build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        dense: Any = read(config, "mlp_only_layers", list) or []
        every = read(config, "decoder_sparse_step", int) or 1
        block = build.at("mlp")
        if index in dense or (index + 1) % every:
            return mlp(block, shape)
        width = size_of(config, "moe_intermediate_size")
        experts = make_experts(block, shape, config, rule_of(config), width)
        shared = read(config, "shared_expert_intermediate_size", int)
        if not shared:
            return ExpertsBlock(block.at("gate"), experts)
        return ExpertsBlock(
            block.at("gate"),
            experts,
            mlp(block.at("shared_expert"), shape, shared),
            block.at("shared_expert_gate"),
        )


class Qwen2MoeShape(Shape):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.qkv_bias = read(config, "qkv_bias", bool) is not False


class Qwen2MoeModel(Qwen3MoeModel):
    shape_class = Qwen2MoeShape

    @staticmethod
    def head_norm(shape: Shape) -> None:
        return None


class OlmoeModel(LlamaModel):
    @staticmethod
    def head_norm(shape: Shape) -> HeadNorm:
        return partial(all_heads, eps=shape.eps)

    @staticmethod
    def feed_forward(
        build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        if config.get("clip_qkv") is not None:
            raise ModelError(
                f"the checkpoint's config has clip_qkv={config['clip_qkv']!r}; this architecture "
                "is served without"
            )
        block = build.at("mlp")
        return ExpertsBlock(block.at("gate"), make_experts(block, shape, config, rule_of(config)))


class AriaTextModel(LlamaModel):
    @staticmethod
    def feed_forward(
        build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        block = build.at("mlp")
        inner = block.at("experts")
        is_older = build.has(inner.at("fc1").path)
        width = shape.intermediate_size
        experts = Experts(
            inner,
            size_of(config, "moe_num_experts"),
            shape.hidden_size,
            width,
            rule=RouterRule(size_of(config, "moe_topk"), renormalize=True),
            names=("gate_proj", "up_proj", "fc2" if is_older else "down_proj"),
            merged="fc1" if is_older else "gate_up_proj",
            is_transposed=True,
        )
        shared = width * size_of(config, "moe_num_shared_experts")
        return ExpertsBlock(
            block.at("router"), experts, mlp(block.at("shared_experts"), shape, shared)
        )


def rule_of(config: Mapping[str, Any]) -> RouterRule:
    """Return how experts are chosen."""
    return RouterRule(
        size_of(config, "num_experts_per_tok"),
        renormalize=bool(read(config, "norm_topk_prob", bool)),
    )


def make_experts(
    build: Build,
    shape: Shape,
    config: Mapping[str, Any],
    rule: RouterRule,
    width: int | None = None,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Experts:
    """Return the experts of a block. build: of the block. width: None = the config's intermediate
    size. names: of their gate, up and down. Their number has two names: transformers 5 writes the
    second one for all models."""
    return Experts(
        build.at("experts"),
        read(config, "num_experts", int) or size_of(config, "num_local_experts"),
        shape.hidden_size,
        shape.intermediate_size if width is None else width,
        rule=rule,
        activation=shape.activation,
        names=names,
        is_transposed=None if config.get("model_type") in TRANSPOSED else False,
    )
