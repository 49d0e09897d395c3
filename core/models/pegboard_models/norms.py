"""Norms that several families have, and norms of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import Build, Layer, LayerNorm, Norm
from pegboard.layers.build import PlainTensor
from pegboard.layers.shards import Group, Span, scaled


class Heads(NamedTuple):
    """The heads of queries or keys. count: of the model. held: those that this rank holds. copies:
    how many ranks hold each of them."""

    count: int
    held: Span
    copies: int = 1


HeadNorm = Callable[[Build, Heads, int], Callable[[Tensor], Tensor]]
"""(build, heads, their channels) → a norm of queries or keys [T, heads, channels]."""


def heads_held(build: Build, num_heads: int, num_kv_heads: int) -> tuple[Heads, Heads]:
    """Return the heads of queries and of keys that this rank holds."""
    size = build.tensor.size
    of_queries, of_keys = build.tensor.heads(num_heads, num_kv_heads)
    others = [Group(rank, size).heads(num_heads, num_kv_heads)[1] for rank in range(size)]
    return Heads(num_heads, of_queries), Heads(num_kv_heads, of_keys, others.count(of_keys))


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
    build: Build, heads: Heads, head_dim: int, norm: Callable[..., Norm] = Norm, eps: float = 1e-6
) -> Callable[[Tensor], Tensor]:
    """Return a norm of each head."""
    return norm(build, head_dim, eps)


def all_heads(
    build: Build, heads: Heads, head_dim: int, norm: Callable[..., Norm] = Norm, eps: float = 1e-6
) -> Callable[[Tensor], Tensor]:
    """Return a norm of all heads together."""
    if build.tensor.size > 1:
        if norm is not Norm:
            raise ModelError(f"{build.path}: ranks cannot divide a {norm.__name__} of all heads")
        return DividedNorm(build, heads, head_dim, eps)
    together = norm(build, heads.count * head_dim, eps)
    return lambda x: together(x.flatten(1)).view(x.shape)


class DividedNorm(Layer):
    """(x [T, heads, D]) → x divided by the root mean square over the heads of all ranks. It is not
    recorded."""

    def __init__(self, build: Build, heads: Heads, head_dim: int, eps: float) -> None:
        super().__init__(build)
        self.heads = heads
        self.head_dim = head_dim
        self.eps = eps

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        name = f"{self.build.path}.weight"
        start, stop = scaled(self.heads.held, self.head_dim)
        count = stop - start
        sources = {name: ((start, stop),)}
        self.weight = PlainTensor({name: (0, count)}, (count,), self.build, sources=sources)
        return [WantedWeight(name, (self.heads.count * self.head_dim,))]

    def accept(self, piece: WeightPiece) -> None:
        self.weight.accept(piece)

    def bind(self) -> None:
        weight = self.weight.data
        share = 1 / (self.heads.copies * self.heads.count * self.head_dim)
        eps = self.eps
        total = self.build.tensor.summed(lambda squares: squares)

        def forward(x: Tensor) -> Tensor:
            wide = x.flatten(1).float()
            mean = total(wide.square().sum(1, keepdim=True) * share)
            return (wide * (mean + eps).rsqrt() * weight).to(x.dtype).view(x.shape)

        self.forward = forward
