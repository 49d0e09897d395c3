"""The EAGLE head of the Llama form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pegboard.layers import Build, Norm, read, size_of
from pegboard_models.blocks import GatedMLP, PreNorm, SelfAttention, heads_of
from pegboard_models.decoder import DecoderSizes
from pegboard_models.eagle import EagleForm, EagleHead, FirstLayer
from pegboard_models.rope import rope_parameters, scaled_rope


class EagleLlama(EagleHead):
    """The first layer has no norm before its attention, and the last one none after it."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        sizes = DecoderSizes(config)
        hidden = sizes.hidden_size
        heads = heads_of(config)
        base, scaling = rope_parameters(config)
        longest = read(config, "max_position_embeddings", int) or 2048
        rope = scaled_rope(build, heads[2], max_positions=longest, base=base, scaling=scaling)
        bias = bool(read(config, "attention_bias", bool))
        activation = read(config, "hidden_act", str) or "silu"

        def layer(build: Build, index: int) -> nn.Module:
            attention = SelfAttention(
                build.at("self_attn"), index, hidden, heads, rope=rope, bias=bias, output_bias=False
            )
            after = Norm(build.at("post_attention_layernorm"), hidden, sizes.eps)
            mlp = GatedMLP(
                build.at("mlp"), hidden, size_of(config, "intermediate_size"), activation
            )
            if index == 0:
                return FirstLayer(attention, after, mlp)
            before = Norm(build.at("input_layernorm"), hidden, sizes.eps)
            return PreNorm((before, attention), (after, mlp))

        super().__init__(
            build,
            layer,
            lambda *positions: (rope(*positions),),
            sizes,
            sizes.num_layers,
            "EagleLlamaForCausalLM",
            EagleForm(norm=""),
        )
