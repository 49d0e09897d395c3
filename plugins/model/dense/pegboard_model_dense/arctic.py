"""Snowflake Arctic (Snowflake 2024): a dense decoder, and beside it experts that read what its
layers read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.layers import Build, RouterRule, read, size_of
from pegboard_model_dense.architecture import Architecture, ExpertSizes, Names
from pegboard_model_dense.attention import Step
from pegboard_model_dense.blocks import GatedMLP, experts_block
from pegboard_model_dense.config import common, number_of_experts, with_experts
from pegboard_model_dense.decoder import Decoder


class Arctic(Decoder):
    """Every n-th layer has experts, the others an ordinary feed-forward block."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        self.is_parallel = bool(read(config, "parallel_attn_mlp_res", bool))
        super().__init__(config, build)

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        names = Names(mlp="block_sparse_moe.mlp", up=("w1", "w3"), down="w2")
        model = common({"rms_norm_eps": 1e-5, "rope_theta": 1e6, **config}, names=names)
        top_k = size_of(config, "num_experts_per_tok")
        experts = ExpertSizes(
            count=number_of_experts(config),
            width=size_of(config, "intermediate_size"),
            rule=RouterRule(top_k, renormalize=top_k > 1),
            router="block_sparse_moe.gate",
            modules="block_sparse_moe.experts",
            names=("w1", "w3", "w2"),
        )
        every = read(config, "moe_layer_frequency", int) or 2
        return with_experts(model, experts, lambda index: (index + 1) % every == 0)

    def make_layer(self, build: Build, index: int, model: Architecture) -> nn.Module:
        experts = model.layers[index].experts
        if experts is None or not self.is_parallel:
            return super().make_layer(build, index, model)
        attention = self.make_attention(build.at(model.names.attention), index, model)
        return HybridLayer(build, model, attention, experts_block(build, model, experts))


class HybridLayer(nn.Module):
    """y = x + attention(norm(x)), then y + feed_forward(norm(y)) + experts(norm(x)). The
    feed-forward block is as wide as the model."""

    def __init__(
        self, build: Build, model: Architecture, attention: nn.Module, experts: nn.Module
    ) -> None:
        super().__init__()
        size = model.hidden_size
        self.attention = attention
        self.experts = experts
        self.feed_forward = GatedMLP(build.at("residual_mlp"), model, size)
        self.before_attention, self.before_mlp, self.before_experts = (
            model.norm(build.at(name), size, model.eps)
            for name in ("input_layernorm", "residual_layernorm", "post_attention_layernorm")
        )

    def forward(self, hidden: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        hidden, residual = self.before_attention.add(hidden, residual)
        for_experts = self.before_experts(residual)  # before the next norm overwrites it
        hidden, residual = self.before_mlp.add(self.attention(hidden, step), residual)
        return self.experts.forward(for_experts) + self.feed_forward.forward(hidden), residual
