"""The Llama architecture (Touvron et al. 2023) and similar ones, which are distinguished by their
configs:

Llama, SmolLM   grouped-query attention, SwiGLU, RMSNorm before each block, rotary embedding
Mistral         the same with an optional sliding window (Jiang et al. 2023)
Qwen2           biases on the query, key and value projections, windows on some layers (Yang et al.
                2024)
Qwen3           RMSNorm on every query and key head instead of biases (Yang et al. 2025)

Models with experts that are otherwise like these are in `experts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from pegboard.errors import ModelError
from pegboard.layers import Build, Norm, read, size_of
from pegboard_models.blocks import GatedMLP, PreNorm, SelfAttention, heads_of
from pegboard_models.decoder import Decoder, DecoderSizes
from pegboard_models.norms import HeadNorm, each_head
from pegboard_models.rope import rope_parameters, scaled_rope

BOTH_USES = "GritLM"
"""A Mistral that makes vectors without its window, with attention in both directions."""


class Shape(DecoderSizes):
    """The sizes from a checkpoint's config, under uniform names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.intermediate_size = size_of(config, "intermediate_size")
        self.heads = heads_of(config)
        self.max_positions = read(config, "max_position_embeddings", int) or 2048
        self.activation = read(config, "hidden_act", str) or "silu"
        self.qkv_bias = self.output_bias = bool(read(config, "attention_bias", bool))
        self.mlp_bias = bool(read(config, "mlp_bias", bool))
        types = read(config, "layer_types", list[str])
        if types and len(types) < self.num_layers:
            raise ModelError(f"layer_types has {len(types)} entries for {self.num_layers} layers")
        self.windows = [self._window(config, index) for index in range(self.num_layers)]

    @staticmethod
    def _window(config: Mapping[str, Any], index: int) -> int | None:
        """Return the sliding window of a layer, in tokens. It applies to all layers (Mistral) or to
        those that `layer_types` names (Qwen)."""
        window = read(config, "sliding_window", int)
        if not window or read(config, "use_sliding_window", bool) is False:
            return None
        if types := read(config, "layer_types", list[str]):
            return window if types[index] == "sliding_attention" else None
        return window if index >= (read(config, "max_window_layers", int) or 0) else None


class LlamaModel(Decoder):
    """Attention and a feed-forward block, each after a norm."""

    shape_class: type[Shape] = Shape
    attention_class: type[SelfAttention] = SelfAttention

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        refuse_far_tokens(config, build.max_positions)
        shape = self.shape_class(config)
        if build.sees_all and read(config, "architectures", list[str]) == [BOTH_USES]:
            shape.windows = [None] * shape.num_layers
        base, scaling = rope_parameters(config)
        hidden = shape.hidden_size
        rope = scaled_rope(
            build, shape.heads[2], max_positions=shape.max_positions, base=base, scaling=scaling
        )
        norm_of_heads = self.head_norm(shape)

        def layer(build: Build, index: int) -> nn.Module:
            attention = self.attention_class(
                build.at("self_attn"),
                index,
                hidden,
                shape.heads,
                rope=rope,
                bias=shape.qkv_bias,
                norm=norm_of_heads,
                output_bias=shape.output_bias,
                window=shape.windows[index],
            )
            return PreNorm(
                (Norm(build.at("input_layernorm"), hidden, shape.eps), attention),
                (
                    Norm(build.at("post_attention_layernorm"), hidden, shape.eps),
                    self.feed_forward(build, index, shape, config),
                ),
            )

        super().__init__(build, layer, shape, rope=rope)

    @staticmethod
    def head_norm(shape: Shape) -> HeadNorm | None:
        """Return what makes the norms of queries and keys."""
        return None

    @staticmethod
    def feed_forward(
        build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        """Return the feed-forward block of a layer. build: of the layer. A model with experts
        overrides this."""
        return mlp(build.at("mlp"), shape)


class Qwen2Shape(Shape):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({"attention_bias": True, **config})
        self.output_bias = False


class Qwen2Model(LlamaModel):
    shape_class = Qwen2Shape


class Qwen3Model(LlamaModel):
    @staticmethod
    def head_norm(shape: Shape) -> HeadNorm | None:
        return partial(each_head, eps=shape.eps)


def refuse_far_tokens(config: Mapping[str, Any], length: int | None) -> None:
    """Raise ModelError if the checkpoint has dual-chunk attention (An et al. 2024), and requests
    may be longer than its first chunk. Within that it is plain attention. length: of the longest
    request, in tokens; None = not known."""
    rule = config.get("dual_chunk_attention_config")
    if not isinstance(rule, Mapping):
        return
    first = size_of(rule, "chunk_size") - (read(rule, "local_size", int) or 0)
    if length is not None and length > first:
        raise ModelError(
            f"the checkpoint has dual-chunk attention, which is computed for its first chunk only, "
            f"{first} tokens; max_model_len is {length}. Set max_model_len to at most {first}, or "
            "hf_overrides with dual_chunk_attention_config=null to attend plainly to far tokens too"
        )


def mlp(build: Build, shape: Shape, width: int | None = None) -> GatedMLP:
    """Return a feed-forward block. width: None = the config's."""
    width = shape.intermediate_size if width is None else width
    return GatedMLP(build, shape.hidden_size, width, shape.activation, bias=shape.mlp_bias)
