"""Cuts an image into slices of nearly the same area as a square that the tower knows (Xu et al.
2024, "LLaVA-UHD"). This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_models.config_numbers import numbers
from pegboard_models.processing import check_values, described, is_color
from pegboard_models.videos import THINNEST

if TYPE_CHECKING:
    from PIL.Image import Image

MOST = "max_slice_nums"
LIMITS = {MOST: 9, "scale_resolution": 448, "patch_size": 14}
TOKENS = {
    "im_start": "<image>",
    "im_end": "</image>",
    "slice_start": "<slice>",
    "slice_end": "</slice>",
    "unk": "<unk>",
    "im_id_start": "<image_id>",
    "im_id_end": "</image_id>",
}
HALF = [0.5, 0.5, 0.5]
DEFAULTS: Mapping[str, Any] = {
    **LIMITS,
    "use_image_id": False,
    "slice_mode": True,
    "image_feature_size": None,
    "norm_mean": HALF,
    "norm_std": HALF,
    **TOKENS,
}
"""The published values of an image processor whose file lacks them."""
Grid = tuple[int, int]
"""Slices beside and below each other."""


def image_values(checkpoint: Checkpoint, patch: int, queries: int) -> dict[str, Any]:
    """Return how images are processed. patch: pixels of a patch's side. queries: rows of a slice.
    Raises ModelError for values that are wrong or do not fit the config."""
    values = described(checkpoint, "image_processor", DEFAULTS)
    numbers(values, LIMITS, "image processor")
    size = values["image_feature_size"]
    stds = values["norm_std"]
    rules = {
        **{name: (isinstance(values[name], str), "the text of a token") for name in TOKENS},
        "patch_size": (values["patch_size"] == patch, f"the {patch} of vision_config"),
        "image_feature_size": (
            size is None or size == queries,
            f"the query_num={queries} of config.json",
        ),
        "slice_mode": (
            values["slice_mode"] is True,
            "true, because only slices have sizes that the tower takes",
        ),
        "use_image_id": (type(values["use_image_id"]) is bool, "true or false"),
        "norm_mean": (is_color(values["norm_mean"]), "three numbers"),
        "norm_std": (is_color(stds) and all(stds), "three numbers that are not 0"),
    }
    check_values(values, rules)
    return values


class Slices(NamedTuple):
    """patches: float32 [patches of all slices, 3, patch, patch], line by line. sizes: (height,
    width) of each slice, in patches; the first one is the whole image. grid: of the other slices;
    None = there are none."""

    patches: np.ndarray
    sizes: Sequence[tuple[int, int]]
    grid: Grid | None


@dataclass(frozen=True)
class Slicer:
    """side: of a square that has the area of a slice, in pixels. patch: of a patch's side."""

    side: int
    patch: int
    mean: Sequence[float]
    deviation: Sequence[float]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Slicer:
        """values: see `image_values`."""
        return cls(
            values["scale_resolution"],
            values["patch_size"],
            values["norm_mean"],
            values["norm_std"],
        )

    def __call__(self, image: "Image", most: int) -> Slices:
        """Return the patches of an RGB image. most: slices. Raises RequestError for a very narrow
        image."""
        from PIL.Image import Resampling

        width, height = image.size
        if max(width, height) > THINNEST * min(width, height):
            raise RequestError(
                f"an image has {width} × {height} pixels; its longer side may be at most "
                f"{THINNEST} times its shorter one. Crop it or add a border"
            )
        grid = self.grid(width, height, most)
        whole = self.fitted(width, height, is_grown=grid is None)
        parts = [image.resize(whole, Resampling.BICUBIC)]
        if grid is not None:
            columns, lines = grid
            slice_width, slice_height = self.fitted(
                rounded(width, columns) / columns, rounded(height, lines) / lines, is_grown=True
            )
            large = image.resize((slice_width * columns, slice_height * lines), Resampling.BICUBIC)
            parts += [
                large.crop((left, top, left + slice_width, top + slice_height))
                for top in range(0, large.height, slice_height)
                for left in range(0, large.width, slice_width)
            ]
        sizes = [(part.height // self.patch, part.width // self.patch) for part in parts]
        return Slices(np.concatenate([self.patches(part) for part in parts]), sizes, grid)

    def grid(self, width: int, height: int, most: int) -> Grid | None:
        """Return the grid of about as many slices as the image's area has squares, whose shape is
        nearest to that of the image. None = the image has the area of one slice."""
        count = min(math.ceil(width * height / self.side**2), most)
        if count <= 1:
            return None
        shapes = [
            (columns, number // columns)
            for number in (count - 1, count, count + 1)
            if 1 < number <= most
            for columns in range(1, number + 1)
            if number % columns == 0
        ]
        ratio = math.log(width / height)
        return min(shapes, key=lambda shape: abs(ratio - math.log(shape[0] / shape[1])))

    def fitted(self, width: float, height: float, *, is_grown: bool) -> tuple[int, int]:
        """Return the width and the height in pixels, whole patches, that an image is scaled to.
        is_grown: small images become larger."""
        if is_grown or width * height > self.side**2:
            ratio = width / height
            height = int(self.side / math.sqrt(ratio))
            width = int(height * ratio)
        return rounded(width, self.patch), rounded(height, self.patch)

    def patches(self, image: "Image") -> np.ndarray:
        """Return the patches of an image of whole patches."""
        side = self.patch
        mean, deviation = (np.array(each, np.float32) for each in (self.mean, self.deviation))
        pixels = (np.asarray(image, np.float32) / np.float32(255) - mean) / deviation
        lines = image.height // side
        columns = image.width // side
        cut = pixels.reshape(lines, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
        return cut.reshape(-1, 3, side, side)


def rounded(length: float, unit: int) -> int:
    """Return the nearest multiple of a unit, at least one."""
    return max(round(length / unit) * unit, unit)
