"""A decoder with latent attention (MLA, DeepSeek-AI 2024, "DeepSeek-V2"). All models of this
package are built from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.interfaces.attention import SparseIndex
from pegboard.layers import Build, Linear, Norm, Rope, Rotation
from pegboard_model_deepseek.shape import Shape
from pegboard_models.blocks import GatedMLP, PreNorm
from pegboard_models.decoder import Decoder, scaled
from pegboard_models.lateness import late
from pegboard_models.latent import LatentAttention
from pegboard_models.rope import rope_parameters, scaled_rope

LATENT_EPS = 1e-6
"""The epsilon of the norms within attention. Configs do not contain it."""


class LatentLayers:
    """The layers of a decoder: attention and feed-forward, each after a norm.

    pairs: how the rotated channels are ordered (see `LatentAttention`). residual_scale: factor of
    what each block adds.
    """

    pairs: bool
    residual_scale = 1.0

    def layer(self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]) -> nn.Module:
        """Return a layer of the stack. A model with other layers overrides this."""

        def norm(name: str) -> Norm:
            return Norm(build.at(name), shape.hidden_size, shape.eps)

        return PreNorm(
            (norm("input_layernorm"), self.attention(build.at("self_attn"), index, shape, config)),
            (norm("post_attention_layernorm"), self.feed_forward(build, index, shape, config)),
            factor=self.residual_scale,
        )

    def attention(
        self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        """Return the attention of a layer. A model with another one overrides this."""
        return LatentSelfAttention(build, index, shape, shape.scale(config), self.pairs)

    def feed_forward(
        self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        """Return the feed-forward block of a layer. build: of the layer. A model with experts
        overrides this."""
        return mlp(build.at("mlp"), shape)


class LatentDecoder(LatentLayers, Decoder):
    """rotates: whether the attention has rotary embeddings."""

    rotates = True

    def __init__(
        self,
        config: Mapping[str, Any],
        build: Build,
        shape: Shape,
        *,
        pairs: bool,
        **factors: float,
    ) -> None:
        self.pairs = pairs
        rope = rope_of(build, config, shape) if self.rotates else None
        super().__init__(
            build,
            lambda build, index: self.layer(build, index, shape, config),
            shape,
            rope=rope,
            **factors,
        )


def rope_of(build: Build, config: Mapping[str, Any], shape: Shape) -> Rope:
    """Return the rotary embedding that the config names."""
    base, scaling = rope_parameters(config)
    return scaled_rope(
        build, shape.rope_dim, max_positions=shape.max_positions, base=base, scaling=scaling
    )


def mlp(build: Build, shape: Shape, width: int | None = None) -> GatedMLP:
    """Return a feed-forward block. width: None = the config's."""
    width = shape.intermediate_size if width is None else width
    return GatedMLP(build, shape.hidden_size, width, shape.activation, bias=shape.mlp_bias)


class LatentSelfAttention(nn.Module):
    """Latent attention. With q_lora_rank, queries too are functions of a small vector. A step may
    have factors of queries [T, 1].
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
        hidden = shape.hidden_size
        heads = shape.num_heads
        query = shape.nope_dim + shape.rope_dim
        split: Any = {"split": "rows", "heads": (heads, 1, query)}
        self.q_a_proj = self.q_a_layernorm = None
        if shape.q_rank is None:
            self.q_proj = Linear(build.at("q_proj"), hidden, heads * query, **split)
        else:
            self.q_a_proj = Linear(build.at("q_a_proj"), hidden, shape.q_rank, bias=shape.bias)
            self.q_a_layernorm = Norm(build.at("q_a_layernorm"), shape.q_rank, LATENT_EPS)
            self.q_proj = Linear(build.at("q_b_proj"), shape.q_rank, heads * query, **split)
        self.kv_a_proj = Linear(
            build.at("kv_a_proj_with_mqa"), hidden, shape.rank + shape.rope_dim, bias=shape.bias
        )
        self.kv_a_layernorm = Norm(build.at("kv_a_layernorm"), shape.rank, LATENT_EPS)
        self.attention = LatentAttention(
            build,
            index,
            heads,
            rank=shape.rank,
            nope_dim=shape.nope_dim,
            rope_dim=shape.rope_dim,
            value_dim=shape.value_dim,
            scale=scale,
            pairs=pairs,
            index=choice,
        )
        self.o_proj = Linear(
            build.at("o_proj"),
            heads * shape.value_dim,
            hidden,
            bias=shape.bias,
            split="columns",
            heads=(heads, 1, shape.value_dim),
        )

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, factors: Tensor | None = None
    ) -> Tensor:
        small = hidden
        if self.q_a_proj is not None and self.q_a_layernorm is not None:
            small = self.q_a_layernorm(self.q_a_proj(hidden))
        q = self.q_proj(small).view(hidden.shape[0], self.attention.num_heads, -1)
        q = late(q, factors)
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
