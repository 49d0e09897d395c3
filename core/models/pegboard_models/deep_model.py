"""A tower whose layers are added to the first layers of a language model with positions on three
axes (Meng et al. 2024, "DeepStack")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pegboard.layers import Build, size_of
from pegboard_models.deep_sizes import DeepNames, DeepSizes
from pegboard_models.deep_tower import DeepTower, Levels
from pegboard_models.language import text_config
from pegboard_models.patch_model import PatchModel, check_width


class DeepModel(PatchModel):
    """The rows of an image have several parts below each other: the embedding, and what is added to
    the hidden states after each of the first layers. Other tokens have zeros there. config: with a
    complete text_config."""

    def __init__(self, config: Mapping[str, Any], build: Build, names: DeepNames) -> None:
        def tower(config: Mapping[str, Any], build: Build) -> DeepTower:
            sizes = DeepSizes.of(config, names)
            check_width(sizes.tower, config)
            return DeepTower(build, sizes)

        super().__init__(config, build, tower)
        self.size = size_of(text_config(config), "hidden_size")
        self.levels: Levels | None = None
        if build.has_first_layer:
            is_chosen = build.layers is not None
            self.levels = Levels(self.language, len(self.tower.taps), is_chosen=is_chosen)

    def embed(self, input_ids: Tensor, *more: Tensor) -> Tensor:
        return self.padded(super().embed(input_ids, *more))

    def padded(self, rows: Tensor) -> Tensor:
        """Return rows [n, hidden] that add nothing to later layers."""
        nothing = rows * 0.0  # this can be recorded
        return torch.cat([rows, *[nothing] * len(self.tower.taps)], 1)

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        if self.levels is not None:
            hidden, *self.levels.rows = hidden.split(self.size, 1)
            hidden = hidden.contiguous()
        return super().forward(hidden, *positions)
