"""Kimi-VL (Kimi Team 2025): MoonViT, two linear layers, and a language model with experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear, size_of
from pegboard_model_kimi_vl.sizes import MoonViTSizes, with_language
from pegboard_model_kimi_vl.tower import EPS, MoonViT
from pegboard_models.language import WithLanguageModel, root_of, text_config


class KimiVL(WithLanguageModel):
    """The tower is built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        config = with_language(config)
        super().__init__(config, build)
        if build.has_first_layer:
            sizes = MoonViTSizes.of(config)
            root = root_of(build)
            self.tower = MoonViT(root.at("vision_tower"), sizes)
            width = size_of(text_config(config), "hidden_size")
            self.projector = Projector(root.at("multi_modal_projector"), sizes, width)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [patches, 3, patch, patch] and image_grid_hw [2] → [rows, hidden] of
        each."""
        return [
            self.projector.forward(
                self.tower.forward(item["pixel_values"], *item["image_grid_hw"].tolist())
            )
            for item in items
        ]


class Projector(nn.Module):
    """([rows, merge², width]) → [rows, out_features]."""

    def __init__(self, build: Build, sizes: MoonViTSizes, out_features: int) -> None:
        super().__init__()
        build = build.alone()
        inner = sizes.width * sizes.merge**2
        self.norm = LayerNorm(build.at("pre_norm"), sizes.width, EPS)
        self.first = Linear(build.at("linear_1"), inner, inner, bias=True)
        self.last = Linear(build.at("linear_2"), inner, out_features, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(self.norm(features).flatten(1))
        rows: Tensor = self.last(functional.gelu(hidden))
        return rows
