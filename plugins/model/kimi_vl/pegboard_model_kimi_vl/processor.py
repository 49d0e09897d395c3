"""Makes of an image what Kimi-VL computes with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_model_kimi_vl.sizes import MoonViTSizes, image_token, merge_of
from pegboard_models.patch_sizes import CLIP
from pegboard_models.processing import check_values, described, is_color

if TYPE_CHECKING:
    from PIL.Image import Image

TEXT = "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
LIMIT = "in_token_limit"
MOST = 16_384
"""The most patches of an image that a request may ask for, all of which attend to each other."""
VALUES = {
    "patch_size": 14,
    "pad_input": False,
    "image_mean": CLIP[0],
    "image_std": CLIP[1],
    LIMIT: 4096,
    "merge_kernel_size": [2, 2],
}
"""The published values of an image processor whose file lacks them."""
LONGEST = 511
"""Patches of a side: the published table of rotations ends there."""


class KimiVLProcessor:
    """An image keeps its size, unless it has more patches than in_token_limit. Then whole blocks of
    patches are made of it: black pixels are added on the right and below, or the edges are left out
    (pad_input)."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        sizes = MoonViTSizes.of(config)
        self.token = image_token(config)
        self.patch = sizes.patch
        self.merge = sizes.merge
        values = described(setup.checkpoint, "image_processor", VALUES)
        check_image_values(values, sizes)
        self.limit: int = values[LIMIT]
        self.is_padded: bool = values["pad_input"]
        self.mean = np.array(values["image_mean"], np.float32)
        self.deviation = np.array(values["image_std"], np.float32)

    def placeholder(self, modality: str) -> Placeholder:
        """The token of the item is the only one whose place its tokens take."""
        return Placeholder(TEXT, (self.token,))

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The arrays are pixel_values, float32 [patches, 3, patch, patch], line by line, and
        image_grid_hw, int64 [2], in patches. Options: in_token_limit. Raises RequestError for other
        options, and for images of which no whole block is left."""
        image = self.in_blocks(scaled(value, self.patch, limit_of(options, self.limit)))
        width, height = (side // self.patch for side in image.size)
        if not 1 <= min(width, height) <= max(width, height) <= LONGEST:
            raise RequestError(
                f"an image of {value.width} × {value.height} pixels becomes {width} × {height} "
                f"patches of {self.patch} pixels; the model takes from 1 to {LONGEST} of them on "
                "each side. Crop it, add a border or enlarge it"
            )
        pixels = np.asarray(image, np.float32) / np.float32(255)
        pixels = (pixels - self.mean) / self.deviation
        cut = pixels.reshape(height, self.patch, width, self.patch, 3).transpose(0, 2, 4, 1, 3)
        patches = np.ascontiguousarray(cut).reshape(-1, 3, self.patch, self.patch)
        num_rows = width * height // self.merge**2
        arrays = {"pixel_values": patches, "image_grid_hw": np.array([height, width], np.int64)}
        return Processed([self.token] * num_rows, arrays)

    def place_rows(self, modality: str, num_rows: int) -> Processed:
        return Processed([self.token] * num_rows, {})

    def in_blocks(self, image: "Image") -> "Image":
        """Return an image of whole blocks of patches."""
        side = self.patch * self.merge
        width, height = image.size
        if self.is_padded:
            return image.crop((0, 0, width + -width % side, height + -height % side))
        left, top = (round(length % side / 2) for length in image.size)
        return image.crop((left, top, left + width // side * side, top + height // side * side))


def scaled(image: "Image", patch: int, limit: int) -> "Image":
    """Return an image that has about `limit` patches if it has more. Raises RequestError if no
    pixel of a side is left."""
    from PIL.Image import Resampling

    count = (image.width // patch) * (image.height // patch)
    if count <= limit:
        return image
    scale = math.sqrt(limit / count)
    width, height = (int(side * scale) for side in image.size)
    if not width or not height:
        raise RequestError(
            f"an image has {image.width} × {image.height} pixels; {width} × {height} of them are "
            f"left for {limit} patches. Crop it or add a border"
        )
    return image.resize((width, height), Resampling.BICUBIC)


def limit_of(options: Mapping[str, Any], default: int) -> int:
    """Return how many patches an image may have. Raises RequestError."""
    if unknown := sorted(options.keys() - {LIMIT}):
        raise RequestError(
            f"mm_processor_kwargs has {', '.join(unknown)}; Kimi-VL takes {LIMIT}",
            parameter="mm_processor_kwargs",
        )
    limit = options.get(LIMIT, default)
    most = max(MOST, default)
    if type(limit) is not int or not 1 <= limit <= most:
        raise RequestError(
            f"mm_processor_kwargs has {LIMIT}={limit!r}; expected a whole number from 1 to {most}",
            parameter="mm_processor_kwargs",
        )
    return limit


def check_image_values(values: Mapping[str, Any], sizes: MoonViTSizes) -> None:
    """Raise ModelError for values of the image processor that are wrong or do not fit the tower."""
    stds = values["image_std"]
    rules = {
        "patch_size": (
            values["patch_size"] == sizes.patch,
            f"the {sizes.patch} of vision_config",
        ),
        "merge_kernel_size": (
            merge_of(values, "image processor") == sizes.merge,
            f"the {[sizes.merge] * 2} of vision_config",
        ),
        LIMIT: (type(values[LIMIT]) is int and values[LIMIT] >= 1, "a whole number from 1 on"),
        "pad_input": (type(values["pad_input"]) is bool, "true or false"),
        "image_mean": (is_color(values["image_mean"]), "three numbers"),
        "image_std": (is_color(stds) and all(stds), "three numbers that are not 0"),
    }
    check_values(values, rules)
