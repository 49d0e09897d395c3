"""What the model and the processor read in a config. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.vision_sizes import VisionSizes

IMAGE_TOKEN = 128257
KIND = "idefics3_vision"


def sizes_of(config: Mapping[str, Any]) -> VisionSizes:
    """Return the sizes of the tower. Its model_type has had several names."""
    return VisionSizes.of({**(config.get("vision_config") or {}), "model_type": KIND}, (KIND,))


def scale_of(config: Mapping[str, Any]) -> int:
    """Return how many patches of a line, and how many lines, are one row. Raises ModelError."""
    scale = config.get("scale_factor", 2)
    if type(scale) is not int or scale < 1:
        raise ModelError(
            f"the checkpoint's config has scale_factor={scale!r}; expected a positive whole number"
        )
    return scale
