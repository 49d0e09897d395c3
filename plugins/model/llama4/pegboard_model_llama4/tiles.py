"""Images as tiles, by the steps of transformers' processor of Llama 4, with Pillow. All sizes are
(height, width). This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULTS: Mapping[str, Any] = {
    "size": {"height": 336, "width": 336},
    "max_patches": 16,
    "resize_to_max_canvas": False,
    "resample": 2,  # Pillow's bilinear filter
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": (0.5,) * 3,
    "image_std": (0.5,) * 3,
}
"""How images are processed if no file says."""
Size = tuple[int, int]


def cut(image: "Image", side: int, values: Mapping[str, Any]) -> tuple[np.ndarray, Size]:
    """Return the tiles of an RGB image, float32 [tiles, 3, side, side], and how many are below and
    beside each other. If there are several, the last one shows all of the image. values: see
    `DEFAULTS`."""
    size = image.height, image.width
    counts = canvas_of(size, side, values["max_patches"], largest=values["resize_to_max_canvas"])
    canvas = counts[0] * side, counts[1] * side
    fit = scaled(size, canvas, None if values["resize_to_max_canvas"] else side)
    pixels = np.zeros((*canvas, 3), np.uint8)
    pixels[: fit[0], : fit[1]] = np.asarray(image.resize(fit[::-1], values["resample"]))
    lines = pixels.reshape(counts[0], side, counts[1], side, 3).transpose(0, 2, 4, 1, 3)
    tiles = lines.reshape(-1, 3, side, side)
    if len(tiles) > 1:
        whole = np.asarray(image.resize((side, side), values["resample"]))
        tiles = np.concatenate([tiles, whole.transpose(2, 0, 1)[None]])
    return normalized(tiles, values), counts


def canvases(most: int) -> list[Size]:
    """Return the numbers of tiles below and beside each other that an image may have, `most` of
    them together. Those of the same shape follow each other."""
    by_shape: dict[float, list[Size]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                columns = count // rows
                by_shape.setdefault(rows / columns, []).append((rows, columns))
    return [counts for group in by_shape.values() for counts in group]


def canvas_of(size: Size, side: int, most: int, *, largest: bool) -> Size:
    """Return the tiles of the canvas that makes an image of this size larger by as little as
    possible, or smaller by as little as possible if none is larger. largest: larger by as much as
    possible. Of several such, it is the one with the fewest tiles."""
    every = canvases(most)
    sides = np.array(every, np.float32) * np.float32(side)
    scales = (sides / np.array(size, np.float32)).min(1)
    larger = scales[scales >= 1]
    if len(larger):
        scale = larger.max() if largest else larger.min()
    else:
        scale = scales.max()
    chosen = [counts for counts, each in zip(every, scales, strict=True) if each == scale]
    return min(chosen, key=math.prod)


def scaled(size: Size, canvas: Size, least: int | None) -> Size:
    """Return the size of an image on a canvas. least: the pixels of a side up to which the image is
    enlarged; None = up to the canvas. The canvas is in float32 as in transformers, or some sizes
    would differ by 1."""
    sides = [np.float32(side) for side in canvas]
    if least is None:
        limits: Sequence[Any] = sides
    else:
        limits = [min(max(each, least), side) for each, side in zip(size, sides, strict=True)]
    by_height, by_width = (limit / each for limit, each in zip(limits, size, strict=True))
    if by_width < by_height:
        fit = min(math.floor(size[0] * by_width), limits[0]), limits[1]
    else:
        fit = limits[0], min(math.floor(size[1] * by_height), limits[1])
    return max(int(fit[0]), 1), max(int(fit[1]), 1)


def normalized(tiles: np.ndarray, values: Mapping[str, Any]) -> np.ndarray:
    """Return numbers float32 of pixels uint8 [tiles, 3, height, width]. Each step is rounded to
    bfloat16, as the models were trained."""
    numbers = tiles.astype(np.float32)
    if values["do_rescale"]:
        numbers = rounded(numbers * np.float32(values["rescale_factor"]))
    if values["do_normalize"]:
        mean, std = (
            rounded(np.array(values[name], np.float32)).reshape(3, 1, 1)
            for name in ("image_mean", "image_std")
        )
        numbers = rounded(rounded(numbers - mean) / std)
    return numbers


def rounded(numbers: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, and to an even one if two are as near."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (nearest & np.uint32(0xFFFF0000)).view(np.float32)
