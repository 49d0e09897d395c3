"""Makes of an image what DeepSeek-OCR computes with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup, Processed
from pegboard_model_deepseek_vl.images import blamed_on, changed, check_same, tiles_of
from pegboard_model_deepseek_vl.ocr_sizes import (
    PATCH,
    SHRINK,
    OcrSizes,
    ocr_projector_of,
    rows_of_side,
)
from pegboard_model_deepseek_vl.processor import MarkedImages

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULTS: Mapping[str, Any] = {
    "image_size": 640,
    "crop_mode": True,
    "min_crops": 2,
    "max_crops": 6,
}
"""How images are processed if neither a file nor an option says it."""
SIDES = ("base_size", "image_size")
MOST_SIDE = 2048
MOST_TILES = 32
"""The largest size in pixels and the most tiles that files and requests may ask for."""
STRETCHED = 640
"""Without tiles, images of at most this size are stretched, and larger ones keep their shape."""


class DeepseekOCRProcessor(MarkedImages):
    """A large image is seen in tiles and as a whole, a small one as a whole. Each line of rows ends
    with one more row, and so does the image."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        super().__init__(setup)
        config = setup.checkpoint.config
        values = self.values
        sizes = OcrSizes.of(config)
        ocr_projector_of(config, sizes)
        check_same(values, {"patch_size": PATCH, "downsample_ratio": SHRINK})
        self.settings = {"base_size": sizes.sam.image_size, **DEFAULTS}
        self.settings |= {name: values[name] for name in self.settings if name in values}
        if problem := wrong_setting(self.settings):
            raise ModelError(f"the checkpoint's processor_config.json has {problem}")

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array pixel_values, float32 [3, size, size], is the whole image. If it is also seen
        in tiles, there are crops, float32 [tiles, 3, size, size], and tiles, int64 [2]: how many of
        them are below and beside each other."""
        settings = changed(self.settings, options, "DeepSeek-OCR")
        if problem := wrong_setting(settings):
            raise RequestError(
                f"mm_processor_kwargs has {problem}", parameter="mm_processor_kwargs"
            )
        side = settings["image_size"]
        with blamed_on(value):
            if not settings["crop_mode"]:
                square = value.resize((side, side)) if side <= STRETCHED else value
                return self.place({}, self.whole(square, side))
            whole = self.whole(value, settings["base_size"])
            if max(value.size) <= side:
                return self.place({}, whole)
            columns, lines = grid_of(value.size, side, settings["min_crops"], settings["max_crops"])
            if columns * lines == 1:
                return self.place({}, whole)
            tiles = tiles_of(value.resize((side * columns, side * lines)), side)
        crops = self.colors.pixels(tiles)
        return self.place({"crops": crops, "tiles": np.array([lines, columns], np.int64)}, whole)

    def whole(self, image: "Image", size: int) -> np.ndarray:
        """Return an image in a square, float32 [3, size, size]."""
        pixels: np.ndarray = self.colors.pixels([self.colors.framed(image, size, size)])[0]
        return pixels

    def place(self, tiles: Mapping[str, np.ndarray], whole: np.ndarray) -> Processed:
        """Return the tokens with the arrays. tiles: those of the tiles, if there are any."""
        count = rows_of_side(whole.shape[-1])
        num_rows = count * (count + 1) + 1
        if tiles:
            count = rows_of_side(tiles["crops"].shape[-1])
            lines, columns = tiles["tiles"].tolist()
            num_rows += lines * count * (columns * count + 1)
        return replace(self.place_rows("image", num_rows), arrays={"pixel_values": whole, **tiles})


def wrong_setting(settings: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the settings, and what was expected; None = nothing."""
    for name in SIDES:
        if type(settings[name]) is not int or not PATCH <= settings[name] <= MOST_SIDE:
            return f"{name}={settings[name]!r}; expected {PATCH} to {MOST_SIDE} pixels"
    if type(settings["crop_mode"]) is not bool:
        return f"crop_mode={settings['crop_mode']!r}; expected true or false"
    least, most = (settings[name] for name in ("min_crops", "max_crops"))
    are_whole = type(least) is int and type(most) is int
    if not are_whole or not 1 <= least <= most <= MOST_TILES:
        return (
            f"min_crops={least!r} and max_crops={most!r}; expected whole numbers from 1 to "
            f"{MOST_TILES}, the first one not above the second one"
        )
    return None


def grid_of(size: tuple[int, int], side: int, least: int, most: int) -> tuple[int, int]:
    """Return how many tiles are beside and below each other: the grid with the shape that is
    nearest to that of the image. Of two that are as near, the later one counts if the image has
    more than half its pixels. size: width and height. side: of a tile."""
    width, height = size
    grids = {
        (columns, lines)
        for count in range(least, most + 1)
        for columns in range(1, count + 1)
        for lines in range(1, count + 1)
        if least <= columns * lines <= most
    }
    best = (1, 1)
    nearest = float("inf")
    # Grids with as many tiles stay in the order of the set, as in the published code.
    for columns, lines in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / lines)
        is_large = width * height > 0.5 * side * side * columns * lines
        if distance < nearest or (distance == nearest and is_large):
            best = (columns, lines)
            nearest = distance
    return best
