"""LFM2 (Liquid AI 2025): gated short convolutions, attention in some layers, and experts in
LFM2-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pegboard.layers import Build, Experts, Rope, RouterRule, read, size_of
from pegboard_model_mamba.decoder import StateDecoder, attention, block, head_size
from pegboard_model_mamba.hybrids import layer_kinds
from pegboard_model_mamba.mixers import GatedConv
from pegboard_models.blocks import ExpertsBlock, GatedMLP
from pegboard_models.decoder import Names

NAMES = ("w1", "w3", "w2")


class Lfm2Model(StateDecoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        hidden = size_of(config, "hidden_size")
        eps = read(config, "norm_eps", float) or 1e-5
        width = read(config, "conv_L_cache", int) or 3
        bias = bool(read(config, "conv_bias", bool))
        kinds = layer_kinds(config, "layer_types")

        def make(build: Build, index: int, rope: Rope | None) -> nn.Module:
            mixer: nn.Module
            if kinds[index]:
                part = build.at("self_attn")
                norms = ("q_layernorm", "k_layernorm")
                mixer = attention(
                    part, index, config, rope, norms=norms, eps=eps, output="out_proj"
                )
            else:
                mixer = GatedConv(build.at("conv"), index, hidden, width, bias)
            second = self.feed_forward(build.at("feed_forward"), index, config)
            return block(build, hidden, eps, ("operator_norm", mixer), ("ffn_norm", second))

        names = Names(norm="embedding_norm")
        super().__init__(
            config, build, make, eps=eps, names=names, rotary_dim=head_size(config), is_tied=True
        )

    def feed_forward(self, build: Build, index: int, config: Mapping[str, Any]) -> nn.Module:
        return GatedMLP(build, size_of(config, "hidden_size"), dense_width(config), names=NAMES)


class Lfm2MoeModel(Lfm2Model):
    """All layers but the first ones have experts."""

    def feed_forward(self, build: Build, index: int, config: Mapping[str, Any]) -> nn.Module:
        hidden = size_of(config, "hidden_size")
        dense = read(config, "num_dense_layers", int)
        if index < (2 if dense is None else dense):
            return GatedMLP(build, hidden, size_of(config, "intermediate_size"), names=NAMES)
        scale = read(config, "routed_scaling_factor", float) or 1.0
        renormalize = read(config, "norm_topk_prob", bool) is not False
        rule = RouterRule(
            size_of(config, "num_experts_per_tok"),
            score="sigmoid",
            renormalize=renormalize,
            scale=scale,
        )
        correction = (
            None if read(config, "use_expert_bias", bool) is False else f"{build.path}.expert_bias"
        )
        num_experts = size_of(config, "num_experts")
        width = size_of(config, "moe_intermediate_size")
        experts = Experts(
            build.at("experts"),
            num_experts,
            hidden,
            width,
            rule=rule,
            names=NAMES,
            correction=correction,
        )
        return ExpertsBlock(build.at("gate"), experts)


def dense_width(config: Mapping[str, Any]) -> int:
    """Return the channels of gate and up, which the config of LFM2 may give before they are
    adjusted."""
    width = read(config, "block_ff_dim", int) or size_of(config, "intermediate_size")
    if read(config, "block_auto_adjust_ff_dim", bool) is False:
        return width
    width = int((read(config, "block_ffn_dim_multiplier", float) or 1.0) * int(2 * width / 3))
    multiple = read(config, "block_multiple_of", int) or 256
    return -(-width // multiple) * multiple
