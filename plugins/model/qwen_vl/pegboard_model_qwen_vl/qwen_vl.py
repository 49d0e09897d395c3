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

    @staticmethod
    def with_text(config: Mapping[str, Any]) -> dict[str, Any]:
        return with_text(config)

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        sizes = QwenSizes.of(config, is_later=self.is_later)
        check_width(sizes.tower, config)
        self.tower = Tower(build, sizes)


class Qwen25VL(Qwen2VL):
    is_later = True


class Qwen3VL(PatchModel):
    """The rows of an image have several parts below each other: the embedding, and what is added to
    the hidden states after each of the first layers. Other tokens have zeros there."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        self.size = size_of(text_config(self.with_text(config)), "hidden_size")
        self.levels: Levels | None = None
        super().__init__(config, build)

    @staticmethod
    def with_text(config: Mapping[str, Any]) -> dict[str, Any]:
        return with_deep_text(config)

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        sizes = DeepSizes.of(config)
        check_width(sizes.tower, config)
        self.tower = DeepTower(build, sizes)
        self.levels = Levels(self.language, len(sizes.taps))

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
