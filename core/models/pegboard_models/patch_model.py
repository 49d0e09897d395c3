"""A vision tower of patches, and a language model with positions on three axes: time, height and
width (Wang et al. 2024, "Qwen2-VL")."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from pegboard.errors import ModelError
from pegboard.layers import Build, size_of
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.patch_sizes import AXES, TowerSizes
from pegboard_models.rope import rope_parameters


class PatchModel(WithLanguageModel):
    """The tower is built only where prompts are embedded. config: with a complete text_config.
    make: of the config and a build, the tower: (patches, how many of them are behind, below and
    beside each other) → rows."""

    def __init__(
        self,
        config: Mapping[str, Any],
        build: Build,
        make: Callable[[Mapping[str, Any], Build], Any],
    ) -> None:
        if rope_parameters(text_config(config))[1].get("mrope_section") is None:
            raise ModelError(
                "the checkpoint's rotary settings have no mrope_section; expected the numbers of "
                f"pairs of channels of {', '.join(AXES)}. Correct rope_parameters or rope_scaling "
                "in config.json"
            )
        super().__init__(config, build)
        build.declared.axes.extend(AXES)
        if build.has_first_layer:
            self.tower = make(config, root_of(build).at("visual"))

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [patches, numbers] and image_grid_thw [3] of images, or
        pixel_values_videos and video_grid_thw → [rows, hidden] of each."""
        name = "pixel_values" if modality == "image" else "pixel_values_videos"
        return [
            self.tower.forward(item[name], *item[f"{modality}_grid_thw"].tolist()) for item in items
        ]


def check_width(sizes: TowerSizes, config: Mapping[str, Any]) -> None:
    """Raise ModelError if the tower's rows do not fit the language model."""
    width = size_of(text_config(config), "hidden_size")
    if sizes.outer != width:
        raise ModelError(
            f"the checkpoint's vision_config says that rows of images have {sizes.outer} numbers; "
            f"those of its language model have {width}"
        )
