"""A vision tower, and a language model with positions on three axes: time, height and width.

Qwen2-VL    images of any size (Wang et al. 2024)
Qwen2.5-VL  most layers of the tower attend to windows (Bai et al. 2025)
Qwen3-VL    layers of the tower are added to the first layers of the language model (Meng et al.
            2024, "DeepStack"), and a video has the times of its frames as text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.layers import Build, size_of
from pegboard_model_qwen_vl.deep import DeepTower, Levels
from pegboard_model_qwen_vl.deep_sizes import DeepSizes, with_deep_text
from pegboard_model_qwen_vl.sizes import AXES, TowerSizes, with_text
from pegboard_model_qwen_vl.tower import Tower
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.rope import rope_parameters


class Qwen2VL(WithLanguageModel):
    """The tower is built only where prompts are embedded."""

    is_later = False

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        config = self.with_text(config)
        if rope_parameters(text_config(config))[1].get("mrope_section") is None:
            raise ModelError(
                "the checkpoint's rotary settings have no mrope_section; expected the numbers of "
                f"pairs of channels of {', '.join(AXES)}. Correct rope_parameters or rope_scaling "
                "in config.json"
            )
        super().__init__(config, build)
        build.declared.axes.extend(AXES)
        if build.has_first_layer:
            self.build_vision(config, root_of(build).at("visual"))

    @staticmethod
    def with_text(config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config with a complete text_config."""
        return with_text(config)

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        sizes = TowerSizes.of(config, is_later=self.is_later)
        check_width(sizes, config)
        self.tower: Any = Tower(build, sizes)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [patches, numbers] and image_grid_thw [3] of images, or
        pixel_values_videos and video_grid_thw → [rows, hidden] of each."""
        name = "pixel_values" if modality == "image" else "pixel_values_videos"
        return [
            self.tower.forward(item[name], *item[f"{modality}_grid_thw"].tolist()) for item in items
        ]


class Qwen25VL(Qwen2VL):
    is_later = True


class Qwen3VL(Qwen2VL):
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


def check_width(sizes: TowerSizes, config: Mapping[str, Any]) -> None:
    """Raise ModelError if the tower's rows do not fit the language model."""
    width = size_of(text_config(config), "hidden_size")
    if sizes.outer != width:
        raise ModelError(
            f"the checkpoint's vision_config says that rows of images have {sizes.outer} numbers; "
            f"those of its language model have {width}"
        )
