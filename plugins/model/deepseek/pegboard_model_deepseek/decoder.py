"""A decoder with latent attention (MLA, DeepSeek-AI 2024, "DeepSeek-V2"). All models of this
package are built from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.interfaces.attention import SparseIndex
from pegboard.layers import (
    Activation,
    Build,
    Embedding,
    Head,
    LayerStack,
    Linear,
    Norm,
    Rope,
    Rotation,
)
from pegboard_model_deepseek.shape import Shape
from pegboard_models.latent import LatentAttention
from pegboard_models.rope import rope_parameters, scaled_rope

LATENT_EPS = 1e-6
"""The epsilon of the norms within attention. Configs do not contain it."""


class LatentDecoder(nn.Module):
    """[T] token ids → [T, vocab] logits, in the stages that core calls: embed, forward, logits.

    pairs: how the rotated channels are ordered (see `LatentAttention`). residual_scale: factor of
    what each block adds. rotates: whether the attention has rotary embeddings.
    """

    residual_scale = 1.0
    rotates = True

    def __init__(
        self, config: Mapping[str, Any], build: Build, shape: Shape, *, pairs: bool
    ) -> None:
        super().__init__()
        inner = build.at("model")
        self.pairs = pairs
        self.embed_tokens = Embedding(inner.at("embed_tokens"), shape.vocab_size, shape.hidden_size)
        self.rope: Rope | None = None
        if self.rotates:
            base, scaling = rope_parameters(config)
            self.rope = scaled_rope(
                inner, shape.rope_dim, max_positions=shape.max_positions, base=base, scaling=scaling
            )

        def make(build: Build, index: int) -> nn.Module:
            return self.layer(build, index, shape, config)

        self.layers = LayerStack(
            inner.at("layers"),
            shape.num_layers,
            make,
            Norm(inner.at("norm"), shape.hidden_size, shape.eps),
        )
        tied = self.embed_tokens if shape.is_tied else None
        self.lm_head = Head(build.at("lm_head"), shape.vocab_size, shape.hidden_size, tied=tied)

    def layer(self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]) -> nn.Module:
        """Return a layer of the stack. A model with other layers overrides this."""
        attention = SelfAttention(
            build.at("self_attn"), index, shape, shape.scale(config), self.pairs
        )
        feed_forward = self.feed_forward(build.at("mlp"), index, shape, config)
        return DecoderLayer(build, shape, attention, feed_forward, self.residual_scale)

    def feed_forward(
        self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        """Return the feed-forward block of a layer. A model with experts overrides this."""
        return FeedForward(build, shape)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return self.layers(hidden, None if self.rope is None else self.rope(positions))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm. `residual` is the sum of their results so
    far."""

    def __init__(
        self,
        build: Build,
        shape: Shape,
        attention: nn.Module,
        feed_forward: nn.Module,
        scale: float,
    ) -> None:
        super().__init__()
        self.input_layernorm = Norm(build.at("input_layernorm"), shape.hidden_size, shape.eps)
        self.self_attn = attention
        self.mlp = feed_forward
        self.scale = scale
        self.post_attention_layernorm = Norm(
            build.at("post_attention_layernorm"), shape.hidden_size, shape.eps
        )

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden, residual = self.post_attention_layernorm.add(
            scaled(self.self_attn.forward(hidden, rotation), self.scale), residual
        )
        return scaled(self.mlp.forward(hidden), self.scale), residual


class SelfAttention(nn.Module):
    """Latent attention. With q_lora_rank, queries too are functions of a small vector.
    latent_scale: factor of the latent. choice: how keys are chosen (see `deepseek_v32`)."""

    def __init__(
        self,
        build: Build,
        index: int,
        shape: Shape,
        scale: float,
        pairs: bool,
        *,
        latent_scale: float = 1.0,
        choice: SparseIndex | None = None,
    ) -> None:
        super().__init__()
        self.latent_scale = latent_scale
        self.rank = shape.rank
        self.num_heads = shape.num_heads
        hidden = shape.hidden_size
        width = shape.num_heads * (shape.nope_dim + shape.rope_dim)
        self.q_a_proj = self.q_a_layernorm = None
        if shape.q_rank is None:
            self.q_proj = Linear(build.at("q_proj"), hidden, width)
        else:
            self.q_a_proj = Linear(build.at("q_a_proj"), hidden, shape.q_rank, bias=shape.bias)
            self.q_a_layernorm = Norm(build.at("q_a_layernorm"), shape.q_rank, LATENT_EPS)
            self.q_proj = Linear(build.at("q_b_proj"), shape.q_rank, width)
        self.kv_a_proj = Linear(
            build.at("kv_a_proj_with_mqa"), hidden, shape.rank + shape.rope_dim, bias=shape.bias
        )
        self.kv_a_layernorm = Norm(build.at("kv_a_layernorm"), shape.rank, LATENT_EPS)
        self.attention = LatentAttention(
            build,
            index,
            shape.num_heads,
            rank=shape.rank,
            nope_dim=shape.nope_dim,
            rope_dim=shape.rope_dim,
            value_dim=shape.value_dim,
            scale=scale,
            pairs=pairs,
            index=choice,
        )
        self.o_proj = Linear(
            build.at("o_proj"), shape.num_heads * shape.value_dim, hidden, bias=shape.bias
        )

    def forward(self, hidden: Tensor, rotation: Rotation | None) -> Tensor:
        small = hidden
        if self.q_a_proj is not None and self.q_a_layernorm is not None:
            small = self.q_a_layernorm(self.q_a_proj(hidden))
        q = self.q_proj(small).view(hidden.shape[0], self.num_heads, -1)
        kv = self.kv_a_proj(hidden)
        latent = scaled(self.kv_a_layernorm(kv[:, : self.rank]), self.latent_scale)
        return self.o_proj(
            self.attention(
                q, latent, kv[:, self.rank :], rotation, *self.indexed(hidden, small, rotation)
            )
        )

    def indexed(
        self, hidden: Tensor, small: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, ...]:
        """Return what the choice of keys needs of each token. small: the vector that queries are
        functions of."""
        return ()


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). width: channels of gate and up; None = the config's
    intermediate size."""

    def __init__(self, build: Build, shape: Shape, width: int | None = None) -> None:
        super().__init__()
        inner = shape.intermediate_size if width is None else width
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = Linear(
            build, shape.hidden_size, 2 * inner, parts=parts, bias=shape.mlp_bias
        )
        self.down_proj = Linear(
            build.at("down_proj"), inner, shape.hidden_size, bias=shape.mlp_bias
        )
        self.activation = Activation(build, shape.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(hidden)))


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
