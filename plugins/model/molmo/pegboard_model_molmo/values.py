"""The values of the file that says how images are cut. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pegboard.errors import ModelError
from pegboard_model_molmo.sizes import POOL, SIDES
from pegboard_models.patch_sizes import CLIP
from pegboard_models.processing import is_color

MAX_CROPS = "max_crops"
VALUES: Mapping[str, Any] = {
    MAX_CROPS: 12,
    "overlap_margins": [4, 4],
    "base_image_input_size": SIDES,
    "image_token_length_w": None,
    "image_token_length_h": None,
    "image_patch_size": None,
    "image_padding_mask": True,
    "do_normalize": True,
    "image_mean": CLIP[0],
    "image_std": CLIP[1],
}
"""The published values of an image processor whose file lacks them. None = those of the tower."""
MOST = 64
"""The largest max_crops. So many crops take 100 MB."""


def is_count(value: object) -> bool:
    """Return whether this may be the number of crops of an image."""
    return type(value) is int and 1 <= value <= MOST


def count_of(value: object) -> int:
    """Return the most crops of an image. Raises ModelError."""
    if type(value) is not int or not is_count(value):
        raise ModelError(
            f"the checkpoint's image processor has {MAX_CROPS}={value!r}; expected a whole number "
            f"from 1 to {MOST}"
        )
    return value


def margins_of(value: object, grid: int) -> tuple[int, int]:
    """Return the margins of a crop, in patches. grid: patches of its side. Raises ModelError."""
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or any(type(margin) is not int or margin < 0 or margin % POOL for margin in value)
        or sum(value) >= grid
    ):
        raise ModelError(
            f"the checkpoint's image processor has overlap_margins={value!r}; expected two even "
            f"numbers of patches, together less than {grid}"
        )
    return value[0], value[1]


def color_of(values: Mapping[str, Any], name: str) -> np.ndarray:
    """Return a number for each of red, green and blue, float32 [3]. Raises ModelError."""
    value = values[name]
    if not is_color(value) or (name == "image_std" and not all(value)):
        raise ModelError(
            f"the checkpoint's image processor has {name}={value!r}; expected three numbers"
            + (" that are not 0" if name == "image_std" else "")
        )
    return np.array(value, np.float32)
