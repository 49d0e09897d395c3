"""What the model and the processor read in a config. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.vision_sizes import VisionSizes

IMAGE_TOKEN = 9
KIND = "idefics3_vision"
QUERIES = {1225: 128, 4900: 256}
"""The rows of a tile with this many patches, if the config does not say."""


def sizes_of(config: Mapping[str, Any]) -> VisionSizes:
    """Return the sizes of the tower. Its model_type has had several names."""
    return VisionSizes.of({**(config.get("vision_config") or {}), "model_type": KIND}, (KIND,))


def queries_of(config: Mapping[str, Any]) -> dict[int, int]:
    """Return how many rows a tile with some number of patches has. Raises ModelError."""
    given = config.get("projector_patch_to_query_dict") or QUERIES
    try:
        counts = {int(patches): int(rows) for patches, rows in given.items()}
    except (AttributeError, TypeError, ValueError):
        counts = {}
    if not counts or min(*counts, *counts.values()) < 1:
        raise ModelError(
            f"the checkpoint's config has projector_patch_to_query_dict={given!r}; expected numbers"
            " of rows by numbers of patches, such as {1225: 128}"
        )
    return counts
