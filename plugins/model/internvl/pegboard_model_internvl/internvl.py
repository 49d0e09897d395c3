"""InternVL (Chen et al. 2023): InternViT, patches that are merged, two linear layers, and a
language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.layers import Build, LayerNorm, read, size_of
from pegboard_model_internvl.sizes import scale_of, selection_of, sizes_of, standard
from pegboard_model_internvl.tower import PUBLISHED, Form, InternVisionTower
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.projectors import MLPProjector, blocks_of


class InternVL(WithLanguageModel):
    """In transformers' form. The tower is built only where prompts are embedded."""

    form = Form()

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_vision(config, build)

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        sizes = sizes_of(config)
        (depth,) = selection_of(config, sizes).depths
        self.scale = scale_of(config)
        self.num_rows = sizes.merged(self.scale)
        root = root_of(build).alone()
        vision = config.get("vision_config") or {}
        self.tower = InternVisionTower(root.at(self.form.tower), vision, sizes, depth, self.form)
        place, norm, first, last = self.form.projector
        projector = root.at(place)
        width = sizes.hidden_size * self.scale**2
        self.norm = LayerNorm(projector.at(norm), width, 1e-5)
        self.projector = MLPProjector(
            projector,
            width,
            size_of(text_config(config), "hidden_size"),
            read(config, "projector_hidden_act", str) or "gelu",
            bias=True,
            names=(first, last),
        )

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [tiles, 3, size, size] → [rows, hidden] of each."""
        tiles = [item["pixel_values"] for item in items]
        features = self.tower.forward(torch.cat(tiles))
        blocks = self.norm(blocks_of(features, self.scale).flatten(0, 1))
        rows = self.projector.forward(blocks)
        return rows.split([len(each) * self.num_rows for each in tiles])


class InternVLChat(InternVL):
    """In the form that InternVL's authors publish."""

    form = PUBLISHED

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(standard(config), build)
