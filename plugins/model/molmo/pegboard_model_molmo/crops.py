"""Cuts an image into crops that overlap. This module does not import torch. All sizes are (height,
width)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_model_molmo.sizes import POOL, TowerSizes, refuse_others, side_of
from pegboard_model_molmo.values import MAX_CROPS, VALUES, color_of, count_of, margins_of
from pegboard_models.processing import described

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]


@dataclass(frozen=True)
class Crops:
    """side: pixels of a crop. patch: pixels of a patch. margins: patches at the left and top, and
    at the right and bottom, of a crop that belong to its neighbours. most: crops of an image. mean,
    deviation: of the colors, float32 [3]."""

    side: int
    patch: int
    margins: Size
    most: int
    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def of(cls, checkpoint: Checkpoint, sizes: TowerSizes) -> Crops:
        """Read the image processor's file. Raises ModelError for values that are wrong or do not
        fit the tower."""
        values = described(checkpoint, "image_processor", VALUES)
        vision = sizes.vision
        rows = vision.grid // POOL
        form = {
            "image_patch_size": vision.patch_size,
            "image_token_length_w": rows,
            "image_token_length_h": rows,
            "image_padding_mask": True,
            "do_normalize": True,
        }
        refuse_others("image processor", values, form)
        if side_of(values["base_image_input_size"], "image processor") != vision.image_size:
            raise ModelError(
                "the checkpoint's image processor has base_image_input_size="
                f"{values['base_image_input_size']!r}; the tower takes {vision.image_size}"
            )
        return cls(
            side=vision.image_size,
            patch=vision.patch_size,
            margins=margins_of(values["overlap_margins"], vision.grid),
            most=count_of(values[MAX_CROPS]),
            mean=color_of(values, "image_mean"),
            deviation=color_of(values, "image_std"),
        )

    @property
    def grid(self) -> int:
        """The patches of a crop's side."""
        return self.side // self.patch

    @property
    def window(self) -> int:
        """The patches of a crop's side without its margins."""
        return self.grid - sum(self.margins)

    def tiling(self, size: Size, most: int) -> Size:
        """Return how many crops are below and beside each other. The margins are added to the
        crops, so they are taken from the image."""
        margin = sum(self.margins) * self.patch
        image = np.array(size, np.float32) - np.float32(margin)
        tilings = tilings_of(most)
        window = np.float32(self.window * self.patch)
        with np.errstate(divide="ignore", invalid="ignore"):
            scales = (tilings.astype(np.float32) * window / image).min(1)
        if (scales < 1).all():
            best = scales.argmax()
        else:
            best = np.where(scales < 1, 10e9, scales).argmin()
        height, width = tilings[best].tolist()
        return height, width

    def cut(self, image: "Image", tiling: Size) -> tuple[np.ndarray, np.ndarray]:
        """Return the patches of the whole image and of its crops, float32 [crops, patches, patch ·
        patch · 3], and how much of each patch shows the image, float32 [crops, patches].

        In the published code, the shares are one crop behind the patches: the first ones are those
        of the first crop, not of the whole image, and the last ones are -1. The model has learned
        from these."""
        margin = sum(self.margins)
        window = self.window
        lines, columns = (count * window + margin for count in tiling)
        pixels, shown = self.fitted(image, (lines * self.patch, columns * self.patch))
        whole, _ = self.fitted(image, (self.side, self.side))
        patches = in_patches(pixels, self.patch)
        shares = in_patches(shown[..., None], self.patch).mean(-1, dtype=np.float32)
        places = [
            (slice(line * window, line * window + self.grid), slice(at, at + self.grid))
            for line in range(tiling[0])
            for at in range(0, tiling[1] * window, window)
        ]
        crops = [in_patches(whole, self.patch), *(patches[place] for place in places)]
        masks = [*(shares[place] for place in places), np.full_like(shares[places[0]], -1)]
        count = len(crops)
        return (
            np.ascontiguousarray(np.stack(crops).reshape(count, self.grid**2, -1)),
            np.ascontiguousarray(np.stack(masks).reshape(count, -1)),
        )

    def fitted(self, image: "Image", size: Size) -> tuple[np.ndarray, np.ndarray]:
        """Return the image scaled into this size with its shape kept, in the middle: normalized
        colors, float32 [height, width, 3], and which pixels show it, float32 [height, width].
        Raises RequestError if nothing of a side is left."""
        scale = min(
            np.float32(size[0]) / np.float32(image.height),
            np.float32(size[1]) / np.float32(image.width),
        )
        height, width = (int(np.float32(side) * scale) for side in (image.height, image.width))
        if not height or not width:
            raise RequestError(
                f"an image of {image.width} × {image.height} pixels becomes {width} × {height} "
                "pixels; at least one is needed on each side. Crop it or add a border"
            )
        top = (size[0] - height) // 2
        left = (size[1] - width) // 2
        colors = np.zeros((*size, 3), np.float32)
        shown = np.zeros(size, np.float32)
        colors[top : top + height, left : left + width] = resized(image, (height, width))
        shown[top : top + height, left : left + width] = 1
        return (colors - self.mean) / self.deviation, shown

    def places(self, tiling: Size) -> np.ndarray:
        """Return which blocks of patches the rows of an image are made of, int64 [rows], counted
        over all crops: those of the whole image, then those of the crops without the margins that
        neighbours show, line by line."""
        side = self.grid // POOL
        first, last = (margin // POOL for margin in self.margins)
        numbers = np.arange((1 + tiling[0] * tiling[1]) * side**2).reshape(-1, side, side)
        crops = numbers[1:].reshape(*tiling, side, side)

        def inner(index: int, count: int) -> slice:
            return slice(first * (index > 0), side - last * (index < count - 1))

        plane = np.block(
            [
                [
                    crops[line, column, inner(line, tiling[0]), inner(column, tiling[1])]
                    for column in range(tiling[1])
                ]
                for line in range(tiling[0])
            ]
        )
        return np.concatenate([numbers[0].ravel(), plane.ravel()])

    def lines(self, tiling: Size) -> Size:
        """Return the lines of rows of the crops, and the rows of a line."""
        height, width = ((each * self.window + sum(self.margins)) // POOL for each in tiling)
        return height, width


def in_patches(plane: np.ndarray, patch: int) -> np.ndarray:
    """[height, width, channels] → [lines, columns, patch · patch · channels]."""
    height, width, channels = plane.shape
    cut = plane.reshape(height // patch, patch, width // patch, patch, channels)
    return cut.transpose(0, 2, 1, 3, 4).reshape(height // patch, width // patch, -1)


def resized(image: "Image", size: Size) -> np.ndarray:
    """Return the colors of an image from 0 to 1, scaled as floats with a triangle filter, float32
    [height, width, 3]."""
    from PIL import Image as images

    colors = np.asarray(image, np.float32) / np.float32(255)
    parts = [
        images.fromarray(np.ascontiguousarray(colors[..., channel])).resize(
            (size[1], size[0]), images.Resampling.BILINEAR
        )
        for channel in range(3)
    ]
    return np.stack([np.asarray(part) for part in parts], 2).clip(0, 1)


@lru_cache(8)
def tilings_of(most: int) -> np.ndarray:
    """Return the shapes of up to `most` crops, int32 [shapes, 2], the smallest ones first."""
    sides = range(1, most + 1)
    shapes = [(height, width) for height in sides for width in sides if height * width <= most]
    return np.array(sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[0])), np.int32)
