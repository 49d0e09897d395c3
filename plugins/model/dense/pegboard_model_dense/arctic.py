"""Snowflake Arctic (Snowflake 2024): a dense decoder, and beside it experts that read what its
layers read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.layers import Build, RouterRule, read, size_of
from pegboard_model_dense.decoder import Decoder, ExpertsBlock, FeedForward, Step
from pegboard_model_dense.experts import number_of_experts, with_experts
from pegboard_model_dense.parts import make_norm
from pegboard_model_dense.traits import ExpertTraits, Names, Traits, common


class Arctic(Decoder):
    """Every so many layers have experts, the others an ordinary feed-forward block."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        self.is_parallel = bool(read(config, "parallel_attn_mlp_res", bool))
        super().__init__(config, build)

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        names = Names(mlp="block_sparse_moe.mlp", up=("w1", "w3"), down="w2")
        traits = common({"rms_norm_eps": 1e-5, "rope_theta": 1e6, **config}, names=names)
        top_k = size_of(config, "num_experts_per_tok")
        own = ExpertTraits(
            count=number_of_experts(config),
            width=size_of(config, "intermediate_size"),
            rule=RouterRule(top_k, renormalize=top_k > 1),
            router="block_sparse_moe.gate",
            modules="block_sparse_moe.experts",
            names=("w1", "w3", "w2"),
        )
        every = read(config, "moe_layer_frequency", int) or 2
        return with_experts(traits, own, lambda index: (index + 1) % every == 0)

    def make_layer(
        self, build: Build, index: int, traits: Traits, taps: dict[int, Tensor]
    ) -> nn.Module:
        experts = traits.layers[index].experts
        if experts is None or not self.is_parallel:
            return super().make_layer(build, index, traits, taps)
        attention = self.make_attention(build.at(traits.names.attention), index, traits)
        return HybridLayer(build, traits, attention, ExpertsBlock(build, traits, experts))


class HybridLayer(nn.Module):
    """y = x + attention(norm(x)), then y + feed_forward(norm(y)) + experts(norm(x)). The
    feed-forward block is as wide as the model."""

    def __init__(
        self, build: Build, traits: Traits, attention: nn.Module, experts: ExpertsBlock
    ) -> None:
        super().__init__()
        size = traits.hidden_size
        self.attention = attention
        self.experts = experts
        self.feed_forward = FeedForward(build.at("residual_mlp"), traits, size)
        self.before_attention, self.before_mlp, self.before_experts = (
            make_norm(build.at(name), size, traits)
            for name in ("input_layernorm", "residual_layernorm", "post_attention_layernorm")
        )

    def forward(self, hidden: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        hidden, residual = self.before_attention.add(hidden, residual)
        for_experts = self.before_experts(residual)  # before the next norm overwrites it
        hidden, residual = self.before_mlp.add(self.attention(hidden, step), residual)
        return self.experts.forward(for_experts, self.feed_forward.forward(hidden)), residual
