"""gpt-oss (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card"):

attention      biases, a learned sink for every head, a sliding window on every second layer, YaRN
feed-forward   experts with biases and a clamped SwiGLU; the softmax of the router is over the
chosen experts
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import (
    Attention,
    Build,
    Embedding,
    Experts,
    Head,
    LayerStack,
    Linear,
    Norm,
    QKVLinear,
    Rope,
    Rotation,
    RouterRule,
    read,
    size_of,
)
from pegboard_models.clamped_swiglu import ClampedSwiGLU
from pegboard_models.rope import rope_parameters, scaled_rope

ALPHA = 1.702
LIMIT = 7.0
"""Of the activation. Configs contain the limit, but no config contains another alpha."""


class Shape:
    """The sizes from a checkpoint's config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.hidden_size = size_of(config, "hidden_size")
        self.expert_size = size_of(config, "intermediate_size")
        self.num_layers = size_of(config, "num_hidden_layers")
        self.num_heads = size_of(config, "num_attention_heads")
        self.num_kv_heads = read(config, "num_key_value_heads", int) or self.num_heads
        self.head_dim = read(config, "head_dim", int) or self.hidden_size // self.num_heads
        self.vocab_size = size_of(config, "vocab_size")
        self.max_positions = read(config, "max_position_embeddings", int) or 131072
        self.eps = read(config, "rms_norm_eps", float) or 1e-5
        self.bias = read(config, "attention_bias", bool) is not False
        self.is_tied = bool(read(config, "tie_word_embeddings", bool))
        self.num_experts = size_of(config, "num_local_experts")
        self.top_k = read(config, "num_experts_per_tok", int) or size_of(
            config, "experts_per_token"
        )
        self.activation = ClampedSwiGLU(
            read(config, "swiglu_alpha", float) or ALPHA,
            read(config, "swiglu_limit", float) or LIMIT,
        )
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} heads of keys "
                "and values equally"
            )
        window = read(config, "sliding_window", int)
        types = read(config, "layer_types", list[str])
        types = types or [
            ("sliding_attention", "full_attention")[i % 2] for i in range(self.num_layers)
        ]
        if len(types) < self.num_layers or not {"sliding_attention", "full_attention"}.issuperset(
            types
        ):
            told = "sliding_attention or full_attention for each layer"
            raise ModelError(
                f"layer_types is {types} for {self.num_layers} layers; expected {told}"
            )
        self.windows = [
            window if kind == "sliding_attention" else None for kind in types[: self.num_layers]
        ]


class GptOssModel(nn.Module):
    """[T] token ids → [T, vocab] logits, in the stages that core calls: embed, forward, logits."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        shape = Shape(config)
        base, scaling = rope_parameters(config)
        inner = build.at("model")
        self.embed_tokens = Embedding(inner.at("embed_tokens"), shape.vocab_size, shape.hidden_size)
        self.rope = scaled_rope(
            inner, shape.head_dim, max_positions=shape.max_positions, base=base, scaling=scaling
        )
        self.layers = LayerStack(
            inner.at("layers"),
            shape.num_layers,
            lambda b, i: DecoderLayer(b, i, shape, self.rope),
            Norm(inner.at("norm"), shape.hidden_size, shape.eps),
        )
        tied = self.embed_tokens if shape.is_tied else None
        self.lm_head = Head(build.at("lm_head"), shape.vocab_size, shape.hidden_size, tied=tied)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return self.layers(hidden, self.rope(positions))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


class DecoderLayer(nn.Module):
    """Attention and experts, each after a norm. `residual` is the sum of their results so far."""

    def __init__(self, build: Build, index: int, shape: Shape, rope: Rope) -> None:
        super().__init__()
        self.input_layernorm = Norm(build.at("input_layernorm"), shape.hidden_size, shape.eps)
        self.self_attn = SelfAttention(build.at("self_attn"), index, shape, rope)
        self.post_attention_layernorm = Norm(
            build.at("post_attention_layernorm"), shape.hidden_size, shape.eps
        )
        self.mlp = ExpertsBlock(build.at("mlp"), shape)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn.forward(hidden, rotation)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp.forward(hidden), residual


class SelfAttention(nn.Module):
    """Grouped-query attention. A head's sink takes a part of its softmax and adds nothing to the
    result."""

    def __init__(self, build: Build, index: int, shape: Shape, rope: Rope) -> None:
        super().__init__()
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self.qkv_proj = QKVLinear(build, shape.hidden_size, *heads, bias=shape.bias)
        self.o_proj = Linear(
            build.at("o_proj"), shape.num_heads * shape.head_dim, shape.hidden_size, bias=shape.bias
        )
        self.attention = Attention(
            build, index, *heads, window=shape.windows[index], rope=rope, has_sinks=True
        )

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        q, k, v = self.qkv_proj(hidden)
        return self.o_proj(self.attention(q, k, v, rotation))


class ExpertsBlock(nn.Module):
    """[T, hidden] → [T, hidden]."""

    def __init__(self, build: Build, shape: Shape) -> None:
        super().__init__()
        self.router = Linear(
            build.at("router"), shape.hidden_size, shape.num_experts, bias=True, is_router=True
        )
        self.experts = Experts(
            build.at("experts"),
            shape.num_experts,
            shape.hidden_size,
            shape.expert_size,
            rule=RouterRule(shape.top_k, renormalize=True),
            bias=True,
            activation=shape.activation,
            is_transposed=True,
            is_interleaved=True,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.experts(hidden, self.router(hidden))
