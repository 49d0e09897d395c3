"""The bias that attention gets by the distance of two tokens (Raffel et al. 2020, "T5")."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import Build, Layer
from pegboard.layers.build import PlainTensor

NUM_BUCKETS = 32
REACH = 128
"""All distances from here on have the same bias."""


class DistanceBias(Layer):
    """`bias.data`: float32 [H, 2 REACH + 1] of this rank's heads, as `AttentionLayer` takes it. The
    checkpoint has a table [NUM_BUCKETS, heads]: several distances have the same bias."""

    def __init__(self, build: Build, num_heads: int) -> None:
        super().__init__(build)
        self.num_heads = num_heads
        self.heads = slice(*build.tensor.attention_heads(num_heads, num_heads)[0])
        shape = (self.heads.stop - self.heads.start, 2 * REACH + 1)
        self.bias = PlainTensor({}, shape, build, dtype="float32")

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        name = f"{self.build.path}.weight"
        shape = (NUM_BUCKETS, self.num_heads)
        self.table = PlainTensor({name: (0, NUM_BUCKETS)}, shape, self.build, dtype="float32")
        return [WantedWeight(name, shape)]

    def accept(self, piece: WeightPiece) -> None:
        self.table.accept(piece)

    def finish(self) -> None:
        table = self.table.data[:, self.heads]
        buckets = buckets_of(torch.arange(-REACH, REACH + 1)).to(table.device)
        self.bias.data.copy_(table[buckets].T)


def buckets_of(distances: Tensor) -> Tensor:
    """Return the row of the table for each distance, of the key from the query. Half of the rows
    are for keys after the query. Of each half, one half has a row for each distance, and in the
    other half the rows grow wider, up to REACH."""
    half = NUM_BUCKETS // 2
    exact = half // 2
    away = distances.abs()
    growth = torch.log(away.clamp(min=1) / exact) / math.log(REACH / exact)
    wide = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(away < exact, away, wide) + half * (distances > 0)
