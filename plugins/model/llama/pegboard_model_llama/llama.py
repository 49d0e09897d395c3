"""The Llama architecture (Touvron et al. 2023) and similar ones, which are distinguished by their configs:

Llama, SmolLM   grouped-query attention, SwiGLU, RMSNorm before each block, rotary embedding
Mistral         the same with an optional sliding window (Jiang et al. 2023)
Qwen2           biases on the query, key and value projections, windows on some layers (Yang et al. 2024)
Qwen3           RMSNorm on every query and key head instead of biases (Yang et al. 2025)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Activation, Attention, Build, Embedding, Head, LayerStack, Linear, Norm, QKVLinear, Rope, Rotation
from pegboard.layers.rope import rope_parameters


def _size(config: Mapping[str, Any], name: str) -> int:
    size = config.get(name)
    if not isinstance(size, int):
        raise ModelError(f"the checkpoint's config has {name}={size!r}; this architecture needs a number")
    return size


class Shape:
    """The sizes from a checkpoint's config, under uniform names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.hidden_size = _size(config, "hidden_size")
        self.intermediate_size = _size(config, "intermediate_size")
        self.num_layers = _size(config, "num_hidden_layers")
        self.num_heads = _size(config, "num_attention_heads")
        self.num_kv_heads: int = config.get("num_key_value_heads") or self.num_heads
        self.head_dim: int = config.get("head_dim") or self.hidden_size // self.num_heads
        self.vocab_size = _size(config, "vocab_size")
        self.max_positions: int = config.get("max_position_embeddings") or 2048
        self.eps: float = config.get("rms_norm_eps") or 1e-6
        self.activation: str = config.get("hidden_act") or "silu"
        self.is_qwen3 = config.get("model_type") == "qwen3"
        self.qkv_bias: bool = config.get("attention_bias", config.get("model_type") == "qwen2")
        self.output_bias: bool = config.get("attention_bias", False) and config.get("model_type") != "qwen2"
        self.mlp_bias: bool = config.get("mlp_bias", False)
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} heads of keys and values equally"
            )
        if len(config.get("layer_types") or range(self.num_layers)) < self.num_layers:
            raise ModelError(f"layer_types has {len(config['layer_types'])} entries for {self.num_layers} layers")
        self.windows = [self._window(config, index) for index in range(self.num_layers)]

    @staticmethod
    def _window(config: Mapping[str, Any], index: int) -> int | None:
        """Return the sliding window of a layer, in tokens. It applies to all layers (Mistral) or to those that `layer_types`
        names (Qwen)."""
        window = config.get("sliding_window")
        if not window or config.get("use_sliding_window") is False:
            return None
        types = config.get("layer_types")
        if types:
            return window if types[index] == "sliding_attention" else None
        return window if index >= config.get("max_window_layers", 0) else None


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
        tied = self.embed_tokens if config.get("tie_word_embeddings") else None
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
