"""Rotary position embedding (Su et al. 2021): a table of angles, from which each step gathers
once."""

from __future__ import annotations

import torch
from torch import Tensor

from pegboard.layers.build import Build, Layer

Rotation = tuple[Tensor, Tensor]
"""cos and sin of a step's positions, each [T, rotary_dim / 2] float32."""


class Rope(Layer):
    """(positions [T]) → Rotation. The model calls it once per step and passes the result to every
    layer.

    frequencies: the angle per position of each pair of channels, [rotary_dim / 2] float32.
    magnitude: the factor of cos and sin. length: how many positions the table may have. Model
    plugins make them from a checkpoint's config with `pegboard_models.rope`.
    """

    def __init__(
        self, build: Build, frequencies: Tensor, length: int, magnitude: float = 1.0
    ) -> None:
        super().__init__(build)
        self.pairs = build.rope_style == "pairs"
        self.frequencies = frequencies
        self.length = length
        self.magnitude = magnitude

    def bind(self) -> None:
        length = (
            self.length
            if self.build.max_positions is None
            else min(self.length, self.build.max_positions)
        )
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self.frequencies)
        cos = (angles.cos() * self.magnitude).to(self.build.device)
        sin = (angles.sin() * self.magnitude).to(self.build.device)

        def forward(positions: Tensor) -> Rotation:
            return cos[positions], sin[positions]

        self.forward = forward
