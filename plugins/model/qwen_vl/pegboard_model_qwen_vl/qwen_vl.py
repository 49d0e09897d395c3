"""A vision tower, and a language model with positions on three axes: time, height and width.

Qwen2-VL    images of any size (Wang et al. 2024)
Qwen2.5-VL  most layers of the tower attend to windows (Bai et al. 2025)
Qwen3-VL    layers of the tower are added to the first layers of the language model (Meng et al.
            2024, "DeepStack"), and a video has the times of its frames as text
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.layers import Build
from pegboard_model_qwen_vl.sizes import with_text
from pegboard_models.deep_model import DeepModel
from pegboard_models.deep_sizes import DeepNames, with_deep_text
from pegboard_models.patch_model import PatchModel, check_width
from pegboard_models.window_sizes import WindowSizes
from pegboard_models.window_tower import WindowTower


class Qwen2VL(PatchModel):
    is_later = False

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(with_text(config), build, self.make_tower)

    def make_tower(self, config: Mapping[str, Any], build: Build) -> WindowTower:
        sizes = WindowSizes.of(config, is_later=self.is_later)
        check_width(sizes.tower, config)
        return WindowTower(build, sizes)


class Qwen25VL(Qwen2VL):
    is_later = True


class Qwen3VL(DeepModel):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(with_deep_text(config), build, DeepNames())
