"""LLaVA 1.5 (Liu et al. 2024): a vision tower, two linear layers, and a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.layers import Build, read, size_of
from pegboard_models.language import WithLanguageModel, part_of, text_config
from pegboard_models.projectors import MLPProjector
from pegboard_models.vision import VisionTower
from pegboard_models.vision_sizes import Selection, VisionSizes


class Llava(WithLanguageModel):
    """The tower is built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_vision(config, build)

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        sizes = VisionSizes.of(config.get("vision_config") or {})
        selection = Selection.of(config, sizes)
        self.tower = VisionTower(part_of(build, "vision_tower"), sizes, selection)
        self.projector = MLPProjector(
            part_of(build, "multi_modal_projector"),
            self.tower.width,
            size_of(text_config(config), "hidden_size"),
            read(config, "projector_hidden_act", str) or "gelu",
            bias=read(config, "multimodal_projector_bias", bool) is not False,
        )

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [3, size, size] → [features, hidden] of each."""
        pixels = torch.stack([item["pixel_values"] for item in items])
        return list(self.rows(pixels))

    def rows(self, pixels: Tensor) -> Tensor:
        """Return the projected features of images: [images, 3, size, size] → [images, features,
        hidden]."""
        features = self.tower.forward(pixels)
        rows = self.projector.forward(features.flatten(0, 1))
        return rows.view(*features.shape[:2], -1)
