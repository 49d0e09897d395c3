"""The Llama architecture (Touvron et al. 2023) and similar ones, which are distinguished by their configs:

Llama, SmolLM   grouped-query attention, SwiGLU, RMSNorm before each block, rotary embedding
Mistral         the same with an optional sliding window (Jiang et al. 2023)
Qwen2           biases on the query, key and value projections, windows on some layers (Yang et al. 2024)
Qwen3           RMSNorm on every query and key head instead of biases (Yang et al. 2025)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, get_origin

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Activation, Attention, Build, Embedding, Head, LayerStack, Linear, Norm, QKVLinear, Rope, Rotation
from pegboard.layers.rope import rope_parameters

_TYPES: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}

T = TypeVar("T", int, float, bool, str, list[str])


def _read(config: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """Return a value of the config, or None if it has none. Raises ModelError if the value has another type."""
    value = config.get(name)
    expected: Any = (int, float) if kind is float else get_origin(kind) or kind
    if value is not None and (not isinstance(value, expected) or isinstance(value, bool) != (kind is bool)):
        told = _TYPES[get_origin(kind) or kind]
        raise ModelError(f"the checkpoint's config has {name}={value!r}; this architecture needs {told}")
    return value


def _size(config: Mapping[str, Any], name: str) -> int:
    size = _read(config, name, int)
    if size is None:
        raise ModelError(f"the checkpoint's config has {name}=None; this architecture needs a whole number")
    return size


class Shape:
    """The sizes from a checkpoint's config, under uniform names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.hidden_size = _size(config, "hidden_size")
        self.intermediate_size = _size(config, "intermediate_size")
        self.num_layers = _size(config, "num_hidden_layers")
        self.num_heads = _size(config, "num_attention_heads")
        self.num_kv_heads = _read(config, "num_key_value_heads", int) or self.num_heads
        self.head_dim = _read(config, "head_dim", int) or self.hidden_size // self.num_heads
        self.vocab_size = _size(config, "vocab_size")
        self.max_positions = _read(config, "max_position_embeddings", int) or 2048
        self.eps = _read(config, "rms_norm_eps", float) or 1e-6
        self.activation = _read(config, "hidden_act", str) or "silu"
        self.is_qwen3, is_qwen2 = (config.get("model_type") == name for name in ("qwen3", "qwen2"))
        self.qkv_bias = bool(_read(config, "attention_bias", bool) if "attention_bias" in config else is_qwen2)
        self.output_bias = bool(_read(config, "attention_bias", bool)) and not is_qwen2
        self.mlp_bias = bool(_read(config, "mlp_bias", bool))
        self.is_tied = bool(_read(config, "tie_word_embeddings", bool))
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} heads of keys and values equally"
            )
        types = _read(config, "layer_types", list[str])
        if types and len(types) < self.num_layers:
            raise ModelError(f"layer_types has {len(types)} entries for {self.num_layers} layers")
        self.windows = [self._window(config, index) for index in range(self.num_layers)]

    @staticmethod
    def _window(config: Mapping[str, Any], index: int) -> int | None:
        """Return the sliding window of a layer, in tokens. It applies to all layers (Mistral) or to those that `layer_types`
        names (Qwen)."""
        window = _read(config, "sliding_window", int)
        if not window or _read(config, "use_sliding_window", bool) is False:
            return None
        if types := _read(config, "layer_types", list[str]):
            return window if types[index] == "sliding_attention" else None
        return window if index >= (_read(config, "max_window_layers", int) or 0) else None


class LlamaModel(nn.Module):
    """[T] token ids → [T, vocab] logits, in the stages that core calls: embed, forward, logits."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        shape = Shape(config)
        base, scaling = rope_parameters(config)
        inner = build.at("model")
        self.embed_tokens = Embedding(inner.at("embed_tokens"), shape.vocab_size, shape.hidden_size)
        self.rope = Rope(inner, shape.head_dim, max_positions=shape.max_positions, base=base, scaling=scaling)
        self.layers = LayerStack(inner.at("layers"), shape.num_layers, lambda b, i: DecoderLayer(b, i, shape, self.rope))
        self.norm = Norm(inner.at("norm"), shape.hidden_size, shape.eps)
        tied = self.embed_tokens if shape.is_tied else None
        self.lm_head = Head(build.at("lm_head"), shape.vocab_size, shape.hidden_size, tied=tied)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        hidden, residual = self.layers(hidden, self.rope(positions))
        hidden, _ = self.norm(hidden, residual)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm. `residual` is the sum of their results so far."""

    def __init__(self, build: Build, index: int, shape: Shape, rope: Rope) -> None:
        super().__init__()
        self.input_layernorm = Norm(build.at("input_layernorm"), shape.hidden_size, shape.eps)
        self.self_attn = SelfAttention(build.at("self_attn"), index, shape, rope)
        self.post_attention_layernorm = Norm(build.at("post_attention_layernorm"), shape.hidden_size, shape.eps)
        self.mlp = FeedForward(build.at("mlp"), shape)

    def forward(self, hidden: Tensor, residual: Tensor | None, rotation: Rotation) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn.forward(hidden, rotation)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp.forward(hidden), residual


class SelfAttention(nn.Module):
    """Grouped-query attention. Qwen3 first normalizes each query and key head."""

    def __init__(self, build: Build, index: int, shape: Shape, rope: Rope) -> None:
        super().__init__()
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self.qkv_proj = QKVLinear(build, shape.hidden_size, *heads, bias=shape.qkv_bias)
        inner = shape.num_heads * shape.head_dim
        self.o_proj = Linear(build.at("o_proj"), inner, shape.hidden_size, bias=shape.output_bias)
        self.attention = Attention(build, index, *heads, window=shape.windows[index], rope=rope)
        self.q_norm = Norm(build.at("q_norm"), shape.head_dim, shape.eps) if shape.is_qwen3 else None
        self.k_norm = Norm(build.at("k_norm"), shape.head_dim, shape.eps) if shape.is_qwen3 else None

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        q, k, v = self.qkv_proj(hidden)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(self.attention(q, k, v, rotation))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, build: Build, shape: Shape) -> None:
        super().__init__()
        hidden, inner = shape.hidden_size, shape.intermediate_size
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = Linear(build, hidden, 2 * inner, parts=parts, bias=shape.mlp_bias)
        self.down_proj = Linear(build.at("down_proj"), inner, hidden, bias=shape.mlp_bias)
        self.activation = Activation(build, shape.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(hidden)))
