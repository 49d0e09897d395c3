"""A vision tower, and a language model with positions on three axes: time, height and width.

Qwen2-VL    images of any size (Wang et al. 2024)
Qwen2.5-VL  most layers of the tower attend to windows (Bai et al. 2025)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pegboard.errors import ModelError
from pegboard.layers import Build, size_of
from pegboard_model_qwen_vl.sizes import AXES, TowerSizes, with_text
from pegboard_model_qwen_vl.tower import Tower
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.rope import rope_parameters


class Qwen2VL(WithLanguageModel):
    """The tower is built only where prompts are embedded."""

    is_later = False

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        config = with_text(config)
        if rope_parameters(text_config(config))[1].get("mrope_section") is None:
            raise ModelError(
                "the checkpoint's rotary settings have no mrope_section; expected the numbers of "
                f"pairs of channels of {', '.join(AXES)}. Correct rope_parameters or rope_scaling "
                "in config.json"
            )
        super().__init__(config, build)
        build.declared.axes.extend(AXES)
        if build.has_first_layer:
            sizes = TowerSizes.of(config, is_later=self.is_later)
            width = size_of(text_config(config), "hidden_size")
            if sizes.outer != width:
                raise ModelError(
                    f"the checkpoint's vision_config says that rows of images have {sizes.outer} "
                    f"numbers; those of its language model have {width}"
                )
            self.tower = Tower(root_of(build).at("visual"), sizes)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [patches, numbers] and image_grid_thw [3] of images, or
        pixel_values_videos and video_grid_thw → [rows, hidden] of each."""
        name = "pixel_values" if modality == "image" else "pixel_values_videos"
        return [
            self.tower.forward(item[name], *item[f"{modality}_grid_thw"].tolist()) for item in items
        ]


class Qwen25VL(Qwen2VL):
    is_later = True
