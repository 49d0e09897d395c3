"""Rotary position embedding (Su et al. 2021): a table of angles, from which each step gathers
once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pegboard.layers.build import Build, Layer

Rotation = tuple[Tensor, Tensor]
"""cos and sin of a step's positions, each [T, rotary_dim / 2] float32."""


class Rope(Layer):
    """(positions [T], …) → Rotation. The model calls it once per step and passes the result to
    every layer.

    With several axes of positions, each pair of channels follows one of them (Wang et al. 2024,
    "Qwen2-VL").

    frequencies: the angle per position of each pair of channels, [rotary_dim / 2] float32.
    magnitude: the factor of cos and sin. length: how many positions the table may have. axes: the
    axis of each pair of channels, int64 [rotary_dim / 2]; None = there is one axis. Model plugins
    make them from a checkpoint's config with `pegboard_models.rope`.
    """

    def __init__(
        self,
        build: Build,
        frequencies: Tensor,
        length: int,
        magnitude: float = 1.0,
        axes: Tensor | None = None,
    ) -> None:
        super().__init__(build)
        self.pairs = build.rope_style == "pairs"
        self.frequencies = frequencies
        self.length = length
        self.magnitude = magnitude
        self.axes = axes

    def bind(self) -> None:
        length = (
            self.length
            if self.build.max_positions is None
            else min(self.length, self.build.max_positions)
        )
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self.frequencies)
        cos = (angles.cos() * self.magnitude).to(self.build.device)
        sin = (angles.sin() * self.magnitude).to(self.build.device)

        self.forward = lambda positions: (cos[positions], sin[positions])
        if self.axes is not None and self.build.declared.axes:
            count = len(self.build.declared.axes)
            tables = [_by_axis(table, self.axes, count) for table in (cos, sin)]
            self.forward = lambda *axes: (_of_axes(tables[0], axes), _of_axes(tables[1], axes))


def _by_axis(table: Tensor, axes: Tensor, count: int) -> list[Tensor]:
    """Return one table for each axis: zero where pairs of channels follow another one."""
    return [table * (axes.to(table.device) == axis) for axis in range(count)]


def _of_axes(tables: Sequence[Tensor], axes: Sequence[Tensor]) -> Tensor:
    """Return the sum of the rows of all tables, each at the positions of its axis."""
    total = tables[0][axes[0]]
    for table, positions in zip(tables[1:], axes[1:], strict=True):
        total = total + table[positions]
    return total
