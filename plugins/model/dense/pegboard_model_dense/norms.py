"""Norms that only models of this package have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import Build, LayerNorm, Norm
from pegboard.layers.build import PlainTensor


class OffsetNorm(Norm):
    """A Norm whose weight is stored minus an offset. The sum is kept as float32, so that it is not
    rounded."""

    def __init__(self, build: Build, size: int, eps: float, offset: float = 1.0) -> None:
        super().__init__(replace(build, dtype="float32"), size, eps)
        self.offset = offset

    def accept(self, piece: WeightPiece) -> None:
        super().accept(with_offset(piece, self.offset))


class OffsetLayerNorm(LayerNorm):
    """A LayerNorm whose weight is stored minus 1. The sum is kept as float32."""

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__(replace(build, dtype="float32"), size, eps)

    def accept(self, piece: WeightPiece) -> None:
        super().accept(with_offset(piece, 1.0) if piece.name.endswith(".weight") else piece)


def with_offset(piece: WeightPiece, offset: float) -> WeightPiece:
    """Return the piece with a number added to a plain tensor."""
    data = piece.data
    return replace(piece, data=data.float() + offset) if isinstance(data, Tensor) else piece


def each_head(
    build: Build, heads: int, head_dim: int, norm: Callable[..., Norm], eps: float
) -> Norm:
    """Return a norm of each head."""
    return norm(build, head_dim, eps)


def all_heads(
    build: Build, heads: int, head_dim: int, norm: Callable[..., Norm], eps: float
) -> Callable[[Tensor], Tensor]:
    """Return a norm of all heads together."""
    together = norm(build, heads * head_dim, eps)
    return lambda x: together(x.flatten(1)).view(x.shape)


def own_weights(
    build: Build, heads: int, head_dim: int, norm: Callable[..., Norm], eps: float
) -> Norm:
    """Return a norm of each head, which has weights of its own."""
    return HeadsNorm(build, heads, head_dim, eps)


class HeadsNorm(Norm):
    """(x [T, heads, D]) → each head divided by its deviation from its mean, and multiplied with a
    weight of its own [heads, D] (Cohere)."""

    def __init__(self, build: Build, heads: int, head_dim: int, eps: float) -> None:
        super().__init__(build, head_dim, eps)
        self.heads = heads

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        name = f"{self.build.path}.weight"
        self.weight = PlainTensor({name: (0, self.heads)}, (self.heads, self.size), self.build)
        return [WantedWeight(name, (self.heads, self.size))]

    def bind(self) -> None:
        factors = self.weight.data.flatten()
        eps = self.eps
        layer_norm = self.build.kernels["layer_norm"]
        ones = torch.ones(self.size, dtype=factors.dtype, device=factors.device)

        def forward(x: Tensor) -> Tensor:
            return (layer_norm(x, ones, None, eps).flatten(1) * factors).view(x.shape)

        self.forward = forward
