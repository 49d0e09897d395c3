"""Norms that several families have, and norms of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.layers import Build, Layer, LayerNorm, Norm

HeadNorm = Callable[[Build, int, int], Callable[[Tensor], Tensor]]
"""(build, number of heads, their channels) → a norm of queries or keys [T, heads, channels]."""


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


class PlainNorm(Layer):
    """A norm without a weight: [..., size] → [..., size]."""

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__(build)
        self.size = size
        self.eps = eps

    def bind(self) -> None:
        ones = torch.ones(
            self.size, dtype=getattr(torch, self.build.dtype), device=self.build.device
        )
        norm = self.build.kernels["rms_norm"]
        eps = self.eps
        self.forward = lambda x: norm(x, ones, eps)


def each_head(
    build: Build, heads: int, head_dim: int, norm: Callable[..., Norm] = Norm, eps: float = 1e-6
) -> Callable[[Tensor], Tensor]:
    """Return a norm of each head."""
    return norm(build, head_dim, eps)


def all_heads(
    build: Build, heads: int, head_dim: int, norm: Callable[..., Norm] = Norm, eps: float = 1e-6
) -> Callable[[Tensor], Tensor]:
    """Return a norm of all heads together."""
    together = norm(build, heads * head_dim, eps)
    return lambda x: together(x.flatten(1)).view(x.shape)
