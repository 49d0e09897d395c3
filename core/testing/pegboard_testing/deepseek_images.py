"""What the published processors of DeepSeek's models do with an image, in their order and with
the same arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

MEAN = [0.5, 0.4, 0.3]
DEVIATION = [0.5, 0.6, 0.7]
"""Of colors, which differ so that a wrong order shows."""


def transformed(images: Sequence[Any]) -> np.ndarray:
    """Return float32 [images, 3, height, width], as torchvision's ToTensor and Normalize make it of
    PIL images."""
    scaled = np.stack([np.asarray(image) for image in images]).astype(np.float32) / np.float32(255)
    normal = (scaled - np.float32(MEAN)) / np.float32(DEVIATION)
    return np.asarray(normal.transpose(0, 3, 1, 2), np.float32)


def padded(image: Any, width: int, height: int) -> Any:
    """Return the whole PIL image in this size, with the mean color around it."""
    from PIL import ImageOps

    color = tuple(int(value * 255) for value in MEAN)
    return ImageOps.pad(image, (width, height), color=color)


def squares(image: Any, side: int) -> list[Any]:
    """Cut a PIL image into squares, line by line."""
    return [
        image.crop((x, y, x + side, y + side))
        for y in range(0, image.height, side)
        for x in range(0, image.width, side)
    ]


def best_resolution(size: tuple[int, int], candidates: Any) -> tuple[int, int]:
    """Return the (width, height) that keeps most of an image, and of these the one with the fewest
    pixels that show nothing of it."""
    best = (0, 0)
    most = 0
    least = float("inf")
    for width, height in candidates:
        scale = min(width / size[0], height / size[1])
        kept = min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])
        lost = width * height - kept
        if kept > most or (kept == most and lost < least):
            best = (width, height)
            most = kept
            least = lost
    return best


def vl2_views(image: Any, side: int, candidates: Any, *, cropping: bool) -> Any:
    """Return the views of DeepSeek-VL2, float32 [1 + tiles, 3, side, side], and (tiles
    below, tiles beside each other)."""
    width, height = best_resolution(image.size, candidates) if cropping else (side, side)
    views = [padded(image, side, side), *squares(padded(image, width, height), side)]
    return transformed(views), (height // side, width // side)
