"""MiniCPM-V (Yao et al. 2024): SigLIP for images of any shape, a resampler, and a language
model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.layers import Build, size_of
from pegboard_model_minicpmv.resampler import Resampler
from pegboard_model_minicpmv.sizes import (
    LANGUAGES,
    OLDEST,
    queries_of,
    version_of,
    vision_of,
)
from pegboard_models.language import WithLanguageModel
from pegboard_models.spread import spread_places
from pegboard_models.spread_tower import SpreadTower


class MiniCPMV(WithLanguageModel):
    """The tower is built only where prompts are embedded."""

    part = "llm"
    known: Mapping[str, str] = LANGUAGES

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        version = version_of(config, self.known)
        text = {**config, "model_type": self.known[version]}
        super().__init__({"text_config": text}, build)
        self.is_oldest = version == OLDEST
        if build.has_first_layer:
            self.build_media(config, build.alone())

    def build_media(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        sizes, depth = vision_of(config)
        self.grid = sizes.grid
        self.tower = SpreadTower(build.at("vpm"), sizes, depth, norm="post_layernorm")
        width = size_of(config, "hidden_size")
        self.resampler = Resampler(
            build.at("resampler"), sizes.hidden_size, width, queries_of(config)
        )

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: of images and of videos, pixel_values [patches of all slices, 3, patch, patch],
        and tgt_sizes [slices, 2], the height and the width of each slice in patches → [rows,
        hidden] of each."""
        return [self.image_rows(item["pixel_values"], item["tgt_sizes"].tolist()) for item in items]

    def image_rows(self, patches: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
        """Return the rows of all slices of an image or a video, below each other."""
        slices = patches.flatten(1).split([lines * columns for lines, columns in sizes])
        rows = []
        for part, (lines, columns) in zip(slices, sizes, strict=True):
            # the positions of the oldest version are those of one line with all patches
            shape = (1, lines * columns) if self.is_oldest else (lines, columns)
            features = self.tower.forward(part, spread_places(*shape, self.grid, part))
            rows.append(self.resampler.forward(features, lines, columns))
        return torch.cat(rows)
