"""Positions in other ways than by rotation: learned vectors, and biases of scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import Attention, Build, Layer
from pegboard.layers.build import PlainTensor
from pegboard_model_dense.architecture import Architecture, LayerSizes

ALIBI_CHANNELS = 8
"""Channels that a position bias adds to each head. Two are used; attention kernels need multiples
of 8."""


class Positions(Layer):
    """(positions [T]) → [T, hidden], a learned vector for each position."""

    def __init__(self, build: Build, model: Architecture) -> None:
        super().__init__(build)
        self.first = model.first_position
        self.shape = (model.first_position + model.max_positions, model.hidden_size)

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        name = f"{self.build.path}.weight"
        self.table = PlainTensor({name: (0, self.shape[0])}, self.shape, self.build)
        return [WantedWeight(name, self.shape)]

    def accept(self, piece: WeightPiece) -> None:
        self.table.accept(piece)

    def bind(self) -> None:
        table = self.table.data[self.first :]
        self.forward = lambda positions: table[positions]


class Places(Layer):
    """(positions [T]) → [T, 4], what keys and queries with position biases hold: the position's
    whole multiples of 256, the rest, 1 and 0. Taken from a table, so that it can be recorded."""

    def __init__(self, build: Build, max_positions: int) -> None:
        super().__init__(build)
        self.length = max_positions if build.max_positions is None else build.max_positions

    def bind(self) -> None:
        positions = torch.arange(self.length, device=self.build.device)
        columns = (
            positions // 256,
            positions % 256,
            torch.ones_like(positions),
            torch.zeros_like(positions),
        )
        table = torch.stack(columns, 1).to(getattr(torch, self.build.dtype))
        self.forward = lambda positions: table[positions]


class AlibiAttention(Attention):
    """Attention with linear biases (Press et al. 2022): each head adds slope · (position of the key
    − its own) to its scores.

    The bias is a part of the product q·k: two more channels of the key hold its position, and those
    of the query the slope. A query's own position adds the same to all of its scores, which the
    softmax ignores. A position is stored as two numbers below 256, which every float type stores
    exactly. Any attention backend can therefore be used, but not a cache of integers or of 8-bit
    floats. Called with the step's `Places` instead of a rotation.
    """

    def __init__(
        self, build: Build, layer_index: int, model: Architecture, sizes: LayerSizes
    ) -> None:
        self.scale = model.head_dim**-0.5 if sizes.scale is None else sizes.scale
        self.head_dim = model.head_dim
        heads, _ = build.tensor.heads(model.num_heads, sizes.num_kv_heads)
        self.slopes = model.alibi[slice(*heads)]
        padded = model.head_dim + ALIBI_CHANNELS
        super().__init__(
            build,
            layer_index,
            model.num_heads,
            sizes.num_kv_heads,
            padded,
            scale=self.scale,
            exact_keys=True,
        )

    def bind(self) -> None:
        attend = self.build.attention[self.spec.layer_index]
        device = self.build.device
        num_heads = self.spec.num_heads
        num_kv_heads = self.spec.num_kv_heads
        head_dim = self.head_dim

        def widened(count: int, first: int, second: int) -> Tensor:
            """Return which columns of heads [T, count · D] and places make up the wider heads."""
            order = torch.arange(count * head_dim).view(count, -1)
            extra = torch.full((count, ALIBI_CHANNELS), 3)
            extra[:, 0] = first
            extra[:, 1] = second
            return torch.cat([order, extra + count * head_dim], 1).flatten().to(device)

        of_query = widened(num_heads, 2, 2)
        of_key = widened(num_kv_heads, 0, 1)
        of_value = widened(num_kv_heads, 3, 3)
        slopes = (
            torch.tensor(self.slopes, dtype=getattr(torch, self.build.dtype), device=device)
            / self.scale
        )
        factors = torch.ones(
            num_heads, head_dim + ALIBI_CHANNELS, dtype=slopes.dtype, device=device
        )
        factors[:, head_dim] = slopes * 256
        factors[:, head_dim + 1] = slopes
        factors = factors.flatten()
        of_result = (
            torch.arange(factors.numel(), device=device).view(num_heads, -1)[:, :head_dim].flatten()
        )

        def wide(x: Tensor, places: Tensor, order: Tensor, factors: Tensor | None = None) -> Tensor:
            taken = torch.cat([x.flatten(1), places], 1).index_select(1, order)
            return (taken if factors is None else taken * factors).view(len(x), x.shape[1], -1)

        def forward(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
            wide_q = wide(q, places, of_query, factors)
            out: Tensor = attend(wide_q, wide(k, places, of_key), wide(v, places, of_value))
            return out.index_select(1, of_result)

        self.forward = forward


def alibi_slopes(num_heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """Return the slope of each head: 2^(-largest · i / n). If the number of heads is not a power of
    two, n is the next smaller one, and the other heads have those between, as the paper's authors
    do."""
    power = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-largest * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-largest * (2 * i + 1) / (2 * power)) for i in range(num_heads - power)]
    return (*first, *between)
