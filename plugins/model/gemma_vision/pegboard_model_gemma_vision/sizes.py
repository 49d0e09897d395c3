"""The values of configs, which the models and their processors read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.vision_sizes import VisionSizes

IMAGE_TOKEN = 262144
BEGIN_TOKEN = 255999
NUM_ROWS = 256
PALIGEMMA_IMAGE_TOKEN = 256000
"""Of configs that do not have them, as in transformers."""


def sizes_of(config: Mapping[str, Any]) -> VisionSizes:
    """Return the sizes of the tower."""
    return VisionSizes.of(config.get("vision_config") or {}, ("siglip_vision_model",))


def pooled_side(config: Mapping[str, Any], sizes: VisionSizes) -> int:
    """Return how many rows of an image there are for each of its sides. Raises ModelError if they
    do not divide its patches."""
    rows = config.get("mm_tokens_per_image", NUM_ROWS)
    side = math.isqrt(rows) if type(rows) is int and rows > 0 else 0
    if side < 1 or side * side != rows or sizes.grid % side:
        raise ModelError(
            f"the checkpoint's config has mm_tokens_per_image={rows!r}; expected the square of a "
            f"number that divides the {sizes.grid} patches of a side"
        )
    return side
