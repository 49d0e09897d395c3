"""Idefics 3 (Laurençon et al. 2024) and SmolVLM: a SigLIP tower, patches that are merged, one
linear layer, and a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.layers import Build, LayerNorm, Linear, size_of
from pegboard_model_idefics3.sizes import scale_of, sizes_of
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.projectors import blocks_of
from pegboard_models.vision import VisionTower
from pegboard_models.vision_sizes import Selection


class Idefics3(WithLanguageModel):
    """The tower is built only where prompts are embedded."""

    part = "text_model"

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_vision(config, build)

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        sizes = sizes_of(config)
        self.scale = scale_of(config)
        self.num_rows = sizes.merged(self.scale)
        root = root_of(build, self.part).alone()
        place = root.at("vision_model")
        last = Selection((sizes.num_layers,), drops_first=False)
        self.tower = VisionTower(place, sizes, last)
        self.norm = LayerNorm(place.at("post_layernorm"), sizes.hidden_size, sizes.eps)
        self.projection = Linear(
            root.at("connector").at("modality_projection").at("proj"),
            sizes.hidden_size * self.scale**2,
            size_of(text_config(config), "hidden_size"),
        )

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [tiles, 3, size, size] → [rows, hidden] of each."""
        tiles = [item["pixel_values"] for item in items]
        features = self.tower.forward([*torch.cat(tiles)])
        normed = self.norm(features.flatten(0, 1)).view(features.shape)
        rows: Tensor = self.projection(blocks_of(normed, self.scale).flatten(0, 1))
        return rows.split([len(each) * self.num_rows for each in tiles])
