"""gpt-oss (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card"):

attention      biases, a learned sink for every head, a sliding window on every second layer, YaRN
feed-forward   experts with biases and a clamped SwiGLU; the softmax of the router is over the
chosen experts
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pegboard.errors import ModelError
from pegboard.layers import (
    Build,
    Experts,
    Norm,
    RouterRule,
    read,
    size_of,
)
from pegboard_models.blocks import ExpertsBlock, PreNorm, SelfAttention, heads_of
from pegboard_models.clamped_swiglu import ClampedSwiGLU
from pegboard_models.decoder import Decoder, DecoderSizes
from pegboard_models.rope import rope_parameters, scaled_rope

ALPHA = 1.702
LIMIT = 7.0
"""Of the activation. Configs contain the limit, but no config contains another alpha."""


class Shape(DecoderSizes):
    """The sizes from a checkpoint's config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config, eps=1e-5)
        self.expert_size = size_of(config, "intermediate_size")
        self.heads = heads_of(config)
        self.max_positions = read(config, "max_position_embeddings", int) or 131072
        self.bias = read(config, "attention_bias", bool) is not False
        self.num_experts = size_of(config, "num_local_experts")
        self.top_k = read(config, "num_experts_per_tok", int) or size_of(
            config, "experts_per_token"
        )
        self.activation = ClampedSwiGLU(
            read(config, "swiglu_alpha", float) or ALPHA,
            read(config, "swiglu_limit", float) or LIMIT,
        )
        window = read(config, "sliding_window", int)
        types = read(config, "layer_types", list[str])
        types = types or [
            ("sliding_attention", "full_attention")[i % 2] for i in range(self.num_layers)
        ]
        if len(types) < self.num_layers or not {"sliding_attention", "full_attention"}.issuperset(
            types
        ):
            message = "sliding_attention or full_attention for each layer"
            raise ModelError(
                f"layer_types is {types} for {self.num_layers} layers; expected {message}"
            )
        self.windows = [
            window if kind == "sliding_attention" else None for kind in types[: self.num_layers]
        ]


class GptOssModel(Decoder):
    """Attention and experts, each after a norm. A head's sink takes a part of its softmax and adds
    nothing to the result."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        shape = Shape(config)
        hidden = shape.hidden_size
        base, scaling = rope_parameters(config)
        rope = scaled_rope(
            build, shape.heads[2], max_positions=shape.max_positions, base=base, scaling=scaling
        )

        def layer(build: Build, index: int) -> nn.Module:
            attention = SelfAttention(
                build.at("self_attn"),
                index,
                hidden,
                shape.heads,
                rope=rope,
                bias=shape.bias,
                window=shape.windows[index],
                has_sinks=True,
            )
            block = build.at("mlp")
            experts = Experts(
                block.at("experts"),
                shape.num_experts,
                hidden,
                shape.expert_size,
                rule=RouterRule(shape.top_k, renormalize=True),
                bias=True,
                activation=shape.activation,
                is_transposed=True,
                is_interleaved=True,
            )
            return PreNorm(
                (Norm(build.at("input_layernorm"), hidden, shape.eps), attention),
                (
                    Norm(build.at("post_attention_layernorm"), hidden, shape.eps),
                    ExpertsBlock(block.at("router"), experts, bias=True),
                ),
            )

        super().__init__(build, layer, shape, rope=rope)
