"""Scales an image to whole crops, as Phi-4-multimodal does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_models.processing import FILES, check_values, described, is_color
from pegboard_models.vision_sizes import VisionSizes

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULTS: Mapping[str, Any] = {
    "dynamic_hd": 36,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
}
MOST = 64
"""The largest dynamic_hd."""
LEAST = 10
"""Pixels of a scaled image's shorter side."""
WHITE = 255


@dataclass(frozen=True)
class Crops:
    """size: pixels of a crop's side. patch: of a patch's. most: crops of an image."""

    size: int
    patch: int
    most: int
    mean: np.ndarray
    std: np.ndarray
    factor: float

    @classmethod
    def of(cls, checkpoint: Checkpoint, sizes: VisionSizes) -> Crops:
        """Read what the checkpoint's files say. Raises ModelError."""
        values = described(checkpoint, "image_processor", DEFAULTS, FILES)
        most = values["dynamic_hd"]
        factor = values["rescale_factor"]
        stds = values["image_std"]
        rules = {
            "dynamic_hd": (type(most) is int and 1 <= most <= MOST, f"1 to {MOST} crops"),
            "image_mean": (is_color(values["image_mean"]), "three numbers"),
            "image_std": (is_color(stds) and all(stds), "three numbers that are not 0"),
            "rescale_factor": (type(factor) in (int, float), "a number"),
        }
        check_values(values, rules)
        mean, std = (np.asarray(values[name], np.float32) for name in ("image_mean", "image_std"))
        return cls(sizes.image_size, sizes.patch_size, most, mean, std, float(factor))

    def most_of(self, options: Mapping[str, Any]) -> int:
        """Return how many crops an image may have. options: mm_processor_kwargs. Raises
        RequestError for others than dynamic_hd."""
        most = options.get("dynamic_hd", self.most)
        others = sorted({*options} - {"dynamic_hd"})
        if others or type(most) is not int or not 1 <= most <= self.most:
            wrong = f"has {', '.join(others)}" if others else f"has dynamic_hd={most!r}"
            raise RequestError(
                f"mm_processor_kwargs {wrong}; expected dynamic_hd, the crops of an image, from 1 "
                f"to {self.most}",
                parameter="mm_processor_kwargs",
            )
        return most

    def __call__(self, image: "Image", most: int) -> tuple[np.ndarray, tuple[int, int]]:
        """Return the pixels, float32 [3, height, width], of whole crops, and how many patches below
        and beside each other show something. Raises RequestError for a very narrow image."""
        from PIL.Image import Resampling

        width, height = image.size
        columns, lines = self.shape(width, height, most)
        whole = columns * self.size, lines * self.size
        if whole[0] / width < whole[1] / height:
            scaled = whole[0], int(height * (whole[0] / width))
        else:
            scaled = int(width * (whole[1] / height)), whole[1]
        if min(scaled) < LEAST:
            raise RequestError(
                f"an image of {width} × {height} pixels is {scaled[0]} × {scaled[1]} after scaling;"
                f" the model takes at least {LEAST} on each side. Crop it or add a border"
            )
        pixels = np.full((whole[1], whole[0], 3), WHITE, np.float32)
        pixels[: scaled[1], : scaled[0]] = np.asarray(image.resize(scaled, Resampling.BILINEAR))
        values = (pixels * np.float32(self.factor) - self.mean) / self.std
        shown = [
            (total // self.patch) - (total - used) // self.patch
            for total, used in zip(whole, scaled, strict=True)
        ]
        return np.ascontiguousarray(values.transpose(2, 0, 1), np.float32), (shown[1], shown[0])

    def shape(self, width: int, height: int, most: int) -> tuple[int, int]:
        """Return the crops beside and below each other: as many as the image has at its size, or
        else those whose shape is nearest."""
        columns = math.ceil(width / self.size)
        lines = math.ceil(height / self.size)
        if columns * lines <= most:
            return columns, lines
        ratio = width / height
        nearest = (1, 1)
        least = math.inf
        for shape in shapes(most):
            distance = abs(ratio - shape[0] / shape[1])
            room = 0.5 * self.size**2 * shape[0] * shape[1]
            if distance < least or (distance == least and width * height > room):
                nearest = shape
                least = distance
        return nearest


@lru_cache(8)
def shapes(most: int) -> list[tuple[int, int]]:
    """Return the shapes of at most so many crops, those with few crops first. Those with as many
    stay in the order of the set, as in the published code."""
    every = {
        (i, j)
        for n in range(1, most + 1)
        for i in range(1, n + 1)
        for j in range(1, n + 1)
        if i * j <= most
    }
    return sorted(every, key=lambda shape: shape[0] * shape[1])
