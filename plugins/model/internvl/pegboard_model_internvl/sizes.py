"""What the model and the processor read in a config. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.vision_sizes import Selection, VisionSizes

IMAGE_TOKEN = 151667
KIND = "internvl_vision"


def sizes_of(config: Mapping[str, Any]) -> VisionSizes:
    """Return the sizes of the tower. Raises ModelError if images or patches are not square."""
    vision = dict(config.get("vision_config") or {})
    for name in ("image_size", "patch_size"):
        sides = vision.get(name)
        if isinstance(sides, list | tuple):
            if len({*sides}) != 1:
                raise ModelError(
                    f"the checkpoint's vision_config has {name}={sides!r}; expected equal sides"
                )
            vision[name] = sides[0]
    return VisionSizes.of(vision, (KIND,))


def selection_of(config: Mapping[str, Any], sizes: VisionSizes) -> Selection:
    """Return the state of the tower that is used. Raises ModelError if it is not one state of all
    patches."""
    selection = Selection.of({"vision_feature_layer": -1, **config}, sizes)
    if len(selection.depths) > 1 or not selection.drops_first:
        raise ModelError(
            f"the checkpoint's config has vision_feature_layer={config.get('vision_feature_layer')}"
            f" and vision_feature_select_strategy={config.get('vision_feature_select_strategy')!r};"
            " InternVL takes one layer, and 'default'"
        )
    return selection


def scale_of(config: Mapping[str, Any]) -> int:
    """Return how many patches of a line, and how many lines, are one row. Raises ModelError."""
    ratio = config.get("downsample_ratio", 0.5)
    if type(ratio) not in (int, float) or not 0 < ratio <= 1 or 1 / ratio != int(1 / ratio):
        raise ModelError(
            f"the checkpoint's config has downsample_ratio={ratio!r}; expected 1, 0.5, 0.25 …"
        )
    return int(1 / ratio)
