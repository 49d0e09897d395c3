"""The values of configs that do not have them, as in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEPS = range(384, 2305, 384)
ONEVISION: Mapping[str, Any] = {
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "image_grid_pinpoints": [[height, width] for height in STEPS for width in STEPS],
    "vision_aspect_ratio": "anyres_max_9",
}
IMAGE_TOKEN = 32000
ONEVISION_IMAGE_TOKEN = 151646
