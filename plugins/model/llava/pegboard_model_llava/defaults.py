"""The values of configs that do not have them, as in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import ModelError

STEPS = range(384, 2305, 384)
ONEVISION: Mapping[str, Any] = {
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "image_grid_pinpoints": [[height, width] for height in STEPS for width in STEPS],
    "vision_aspect_ratio": "anyres_max_9",
}
IMAGE_TOKEN = 32000
ONEVISION_IMAGE_TOKEN = 151646
VIDEO_TOKEN = 32000
VIDEO_IMAGE_TOKEN = 32001
"""The tokens of LLaVA-NeXT-Video."""
ONEVISION_VIDEO_TOKEN = 151647
ONEVISION_VIDEOS: Mapping[str, Any] = {
    "do_resize": True,
    "size": {"height": 384, "width": 384},
    "resample": 3,  # Pillow's bicubic filter
    "do_center_crop": False,
    "crop_size": None,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
NEXT_VIDEOS: Mapping[str, Any] = {
    **ONEVISION_VIDEOS,
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
}
"""How videos are processed if no file says."""


def pooling_of(config: Mapping[str, Any]) -> int:
    """Return how many features of a line, and how many lines, are one row of a video of
    LLaVA-NeXT-Video. Raises ModelError for pooling that is no average."""
    mode = config.get("spatial_pool_mode", "average")
    if mode != "average":
        raise ModelError(
            f"the checkpoint's config has spatial_pool_mode={mode!r}; only 'average' is supported"
        )
    stride = config.get("spatial_pool_stride", 2)
    if type(stride) is not int or stride < 1:
        raise ModelError(
            f"the checkpoint's config has spatial_pool_stride={stride!r}; expected a whole number "
            "from 1 on"
        )
    return stride
