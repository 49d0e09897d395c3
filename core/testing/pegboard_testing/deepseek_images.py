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


def ocr_grid(size: tuple[int, int], side: int, least: int, most: int) -> tuple[int, int]:
    """Return the tiles of DeepSeek-OCR, (beside, below each other)."""
    grids = {
        (i, j)
        for n in range(least, most + 1)
        for i in range(1, n + 1)
        for j in range(1, n + 1)
        if least <= i * j <= most
    }
    chosen = (1, 1)
    nearest = float("inf")
    for grid in sorted(grids, key=lambda pair: pair[0] * pair[1]):
        distance = abs(size[0] / size[1] - grid[0] / grid[1])
        if distance < nearest:
            chosen = grid
            nearest = distance
        elif distance == nearest and size[0] * size[1] > 0.5 * side * side * grid[0] * grid[1]:
            chosen = grid
    return chosen


def ocr_views(image: Any, base: int, side: int, most: int = 6) -> Any:
    """Return the views of DeepSeek-OCR with tiles: the whole image float32 [3, base, base], the
    tiles float32 [tiles, 3, side, side] or None, and (tiles below, tiles beside each other)."""
    whole = transformed([padded(image, base, base)])[0]
    if image.width <= side and image.height <= side:
        return whole, None, (1, 1)
    columns, lines = ocr_grid(image.size, side, 2, most)
    tiles = squares(image.resize((side * columns, side * lines)), side)
    return whole, transformed(tiles), (lines, columns)
