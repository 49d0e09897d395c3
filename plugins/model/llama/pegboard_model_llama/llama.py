"""The Llama architecture (Touvron et al. 2023) and similar ones, which are distinguished by their
configs:

Llama, SmolLM   grouped-query attention, SwiGLU, RMSNorm before each block, rotary embedding
Mistral         the same with an optional sliding window (Jiang et al. 2023)
Qwen2           biases on the query, key and value projections, windows on some layers (Yang et al.
2024) Qwen3           RMSNorm on every query and key head instead of biases (Yang et al. 2025)

Models with experts that are otherwise like these are in `experts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import (
    Activation,
    Attention,
    Build,
    Embedding,
    Head,
    LayerStack,
    Linear,
    Norm,
    QKVLinear,
    Rope,
    Rotation,
    read,
    size_of,
)
from pegboard_models.rope import rope_parameters, scaled_rope


class Shape:
    """The sizes from a checkpoint's config, under uniform names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.hidden_size = size_of(config, "hidden_size")
        self.intermediate_size = size_of(config, "intermediate_size")
        self.num_layers = size_of(config, "num_hidden_layers")
        self.num_heads = size_of(config, "num_attention_heads")
        self.num_kv_heads = read(config, "num_key_value_heads", int) or self.num_heads
        self.head_dim = read(config, "head_dim", int) or self.hidden_size // self.num_heads
        self.vocab_size = size_of(config, "vocab_size")
        self.max_positions = read(config, "max_position_embeddings", int) or 2048
        self.eps = read(config, "rms_norm_eps", float) or 1e-6
        self.activation = read(config, "hidden_act", str) or "silu"
        kind = config.get("model_type")
        self.norms_heads = kind in ("qwen3", "qwen3_moe")
        self.norms_all = kind == "olmoe"
        is_qwen2 = kind == "qwen2"
        self.qkv_bias = bool(
            read(config, "attention_bias", bool) if "attention_bias" in config else is_qwen2
        )
        if kind == "qwen2_moe":
            self.qkv_bias = read(config, "qkv_bias", bool) is not False
        self.output_bias = bool(read(config, "attention_bias", bool)) and not is_qwen2
        self.mlp_bias = bool(read(config, "mlp_bias", bool))
        self.is_tied = bool(read(config, "tie_word_embeddings", bool))
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} heads of keys "
                "and values equally"
            )
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


class LlamaModel(nn.Module):
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
            lambda b, i: DecoderLayer(
                b, i, shape, self.rope, self.feed_forward(b, i, shape, config)
            ),
            Norm(inner.at("norm"), shape.hidden_size, shape.eps),
        )
        tied = self.embed_tokens if shape.is_tied else None
        self.lm_head = Head(build.at("lm_head"), shape.vocab_size, shape.hidden_size, tied=tied)

    def feed_forward(
        self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        """Return the feed-forward block of a layer. build: of the layer. A model with experts
        overrides this."""
        return FeedForward(build.at("mlp"), shape)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return self.layers(hidden, self.rope(positions))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm. `residual` is the sum of their results so
    far."""

    def __init__(
        self, build: Build, index: int, shape: Shape, rope: Rope, feed_forward: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm = Norm(build.at("input_layernorm"), shape.hidden_size, shape.eps)
        self.self_attn = SelfAttention(build.at("self_attn"), index, shape, rope)
        self.post_attention_layernorm = Norm(
            build.at("post_attention_layernorm"), shape.hidden_size, shape.eps
        )
        self.mlp = feed_forward

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn.forward(hidden, rotation)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp.forward(hidden), residual


class SelfAttention(nn.Module):
    """Grouped-query attention. Qwen3 first normalizes each query and key head, OLMoE all of them
    together."""

    def __init__(self, build: Build, index: int, shape: Shape, rope: Rope) -> None:
        super().__init__()
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self.qkv_proj = QKVLinear(build, shape.hidden_size, *heads, bias=shape.qkv_bias)
        inner = shape.num_heads * shape.head_dim
        self.o_proj = Linear(build.at("o_proj"), inner, shape.hidden_size, bias=shape.output_bias)
        self.attention = Attention(build, index, *heads, window=shape.windows[index], rope=rope)
        self.q_norm = self.k_norm = None
        if shape.norms_heads or shape.norms_all:
            sizes = [shape.head_dim * (count if shape.norms_all else 1) for count in heads[:2]]
            self.q_norm, self.k_norm = (
                Norm(build.at(name), size, shape.eps)
                for name, size in zip(("q_norm", "k_norm"), sizes, strict=True)
            )
        self.norms_all = shape.norms_all

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        q, k, v = self.qkv_proj(hidden)
        if self.q_norm is not None and self.k_norm is not None:
            if self.norms_all:
                q = self.q_norm(q.flatten(1)).view(q.shape)
                k = self.k_norm(k.flatten(1)).view(k.shape)
            else:
                q = self.q_norm(q)
                k = self.k_norm(k)
        return self.o_proj(self.attention(q, k, v, rotation))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, build: Build, shape: Shape, width: int | None = None) -> None:
        super().__init__()
        hidden = shape.hidden_size
        inner = shape.intermediate_size if width is None else width
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = Linear(build, hidden, 2 * inner, parts=parts, bias=shape.mlp_bias)
        self.down_proj = Linear(build.at("down_proj"), inner, hidden, bias=shape.mlp_bias)
        self.activation = Activation(build, shape.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(hidden)))
