"""A vision tower, and a language model with positions on three axes: time, height and width.

Qwen2-VL    images of any size (Wang et al. 2024)
Qwen2.5-VL  most layers of the tower attend to windows (Bai et al. 2025)
Qwen3-VL    layers of the tower are added to the first layers of the language model (Meng et al.
            2024, "DeepStack"), and a video has the times of its frames as text
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pegboard.layers import Build, size_of
from pegboard_model_qwen_vl.deep import DeepTower, Levels
from pegboard_model_qwen_vl.deep_sizes import DeepSizes, with_deep_text
from pegboard_model_qwen_vl.sizes import QwenSizes, with_text
from pegboard_model_qwen_vl.tower import Tower
from pegboard_models.language import text_config
from pegboard_models.patch_model import PatchModel, check_width


class Qwen2VL(PatchModel):
    is_later = False

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(with_text(config), build, self.make_tower)

    def make_tower(self, config: Mapping[str, Any], build: Build) -> Tower:
        sizes = QwenSizes.of(config, is_later=self.is_later)
        check_width(sizes.tower, config)
        return Tower(build, sizes)


class Qwen25VL(Qwen2VL):
    is_later = True


class Qwen3VL(PatchModel):
    """The rows of an image have several parts below each other: the embedding, and what is added to
    the hidden states after each of the first layers. Other tokens have zeros there."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        config = with_deep_text(config)
        super().__init__(config, build, make_deep_tower)
        self.size = size_of(text_config(config), "hidden_size")
        self.levels: Levels | None = None
        if build.has_first_layer:
            self.levels = Levels(self.language, len(self.tower.taps))

    def embed(self, input_ids: Tensor, *more: Tensor) -> Tensor:
        assert self.levels is not None
        rows = super().embed(input_ids, *more)
        nothing = rows * 0.0  # this can be recorded
        return torch.cat([rows, *[nothing] * self.levels.count], 1)

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        if self.levels is not None:
            hidden, *self.levels.rows = hidden.split(self.size, 1)
            hidden = hidden.contiguous()
        return super().forward(hidden, *positions)


def make_deep_tower(config: Mapping[str, Any], build: Build) -> DeepTower:
    sizes = DeepSizes.of(config)
    check_width(sizes.tower, config)
    return DeepTower(build, sizes)
