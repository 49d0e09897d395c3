"""GLM-4.1V, GLM-4.5V and GLM-4.6V (GLM-V Team 2025): a vision tower whose patches are merged by a
convolution, and GLM-4 or GLM-4.5 with positions on three axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.layers import Build
from pegboard_model_glm4v.sizes import Glm4vSizes, with_text
from pegboard_model_glm4v.tower import Tower
from pegboard_models.patch_model import PatchModel, check_width


class Glm4v(PatchModel):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(with_text(config), build, make_tower)


def make_tower(config: Mapping[str, Any], build: Build) -> Tower:
    sizes = Glm4vSizes.of(config)
    check_width(sizes.tower, config)
    return Tower(build, sizes)
