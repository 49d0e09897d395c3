"""Makes of an image what Qwen-VL computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    PlacedItem,
    Placeholder,
    Processed,
)
from pegboard_model_qwen_vl.sizes import AXES, IMAGE_TOKEN
from pegboard_models.processing import ImageProcessor, token_of

if TYPE_CHECKING:
    from PIL.Image import Image

THINNEST = 200
"""An image's longer side may be this many times its shorter one."""
LIMITS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Options, and what the image processor calls them. It counts pixels of the area with both."""


class QwenVLProcessor:
    """An image is scaled to a multiple of 28 × 28 pixels, each of which becomes a token."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        vision = config.get("vision_config") or {}
        self.token = token_of(config, "image", IMAGE_TOKEN)
        self.images = ImageProcessor(setup.checkpoint)
        self.merge = int(vision.get("spatial_merge_size", 2))
        self.images.fix("merge_size", self.merge)
        self.images.fix("patch_size", int(vision.get("patch_size", 14)))
        self.images.fix("temporal_patch_size", int(vision.get("temporal_patch_size", 2)))

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder("<|vision_start|><|image_pad|><|vision_end|>", (self.token,))

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The arrays are pixel_values, float32 [patches, 3 · frames · patch · patch], and
        image_grid_thw, int64 [3], in patches. The facts have "grid": tokens of its height and of
        its width."""
        if max(value.size) > THINNEST * min(value.size):
            raise RequestError(
                f"an image has {value.width} × {value.height} pixels; its longer side may be at "
                f"most {THINNEST} times its shorter one. Crop it or add a border"
            )
        arrays = self.images([value], self.limits(options))
        grid = arrays["image_grid_thw"][0].astype(np.int64)
        height, width = (int(count) // self.merge for count in grid[1:])
        pixels = np.ascontiguousarray(arrays["pixel_values"], dtype=np.float32)
        return Processed(
            [self.token] * (height * width),
            {"pixel_values": pixels, "image_grid_thw": grid},
            facts={"grid": (height, width)},
        )

    def limits(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options with `size` instead of min_pixels and max_pixels. Raises
        RequestError for wrong numbers."""
        others = {name: value for name, value in options.items() if name not in LIMITS}
        if len(others) == len(options):
            return others
        given = others.get("size", {})
        if not isinstance(given, Mapping):
            raise RequestError(
                f"mm_processor_kwargs has size={given!r}; expected shortest_edge and longest_edge, "
                "or min_pixels and max_pixels instead of it",
                parameter="mm_processor_kwargs",
            )
        size = {name: self.images.inner.size[name] for name in LIMITS.values()} | dict(given)
        size |= {LIMITS[name]: options[name] for name in LIMITS if name in options}
        least, most = (size.get(name) for name in LIMITS.values())
        if type(least) is not int or type(most) is not int or not 0 < least <= most:
            raise RequestError(
                f"mm_processor_kwargs gives min_pixels={least!r} and max_pixels={most!r}; expected "
                "whole numbers from 1 on, the first one not above the second one",
                parameter="mm_processor_kwargs",
            )
        return {**others, "size": size}

    def inputs(
        self, token_ids: Sequence[int], items: Sequence[PlacedItem]
    ) -> Mapping[str, Sequence[int]]:
        """Return how far the positions of each token are from its place. All tokens of an image
        have one time, and a position for each line and each column; the text goes on after the
        largest of them."""
        positions = np.tile(np.arange(len(token_ids), dtype=np.int64), (len(AXES), 1))
        places = positions[0].copy()
        behind = 0
        for item in items:
            height, width = item.facts["grid"]
            start = item.start - behind
            rows, columns = np.divmod(np.arange(height * width), width)
            positions[:, item.start : item.stop] = start + np.stack([0 * rows, rows, columns])
            behind += item.stop - item.start - max(height, width)
            positions[:, item.stop :] = places[item.stop :] - behind
        return {name: axis.tolist() for name, axis in zip(AXES, positions - places, strict=True)}
