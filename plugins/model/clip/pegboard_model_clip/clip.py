"""CLIP (Radford et al. 2021, "Learning Transferable Visual Models From Natural Language
Supervision"): vectors of texts and of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pegboard.layers import Build, LayerNorm, Linear
from pegboard_model_clip.sizes import TextSizes, projection_of, vision_sizes
from pegboard_model_clip.texts import TextModel
from pegboard_models.vision import VisionTower
from pegboard_models.vision_sizes import Selection


class Clip(TextModel):
    """Tokens of a text attend to those before them."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        vision = vision_sizes(config)
        size = projection_of(config)
        super().__init__("CLIP", build, TextSizes.of(config), size)
        alone = build.alone()
        self.project = Linear(alone.at("text_projection"), self.width, size)
        tower = alone.at("vision_model")
        last = Selection((vision.num_layers,), drops_first=False)
        self.tower = VisionTower(tower, vision, last)
        self.norm = LayerNorm(tower.at("post_layernorm"), vision.hidden_size, vision.eps)
        self.visual_projection = Linear(alone.at("visual_projection"), vision.hidden_size, size)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [3, size, size] → [1, width + projection + 1] of each."""
        features = self.tower.forward([item["pixel_values"] for item in items])[:, 0]
        return self.rows_of(self.visual_projection(self.norm(features)))
