"""Images of any size as tiles of a tower's size (LLaVA-NeXT, Liu et al. 2024). This module does not
import torch, because processors read it, too. All sizes are (height, width)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.vision_sizes import Selection, VisionSizes

Size = tuple[int, int]


@dataclass(frozen=True)
class Tiling:
    """resolutions: one of them is cut into tiles. tile: pixels of a tile's side. grid: patches of a
    tile's side. most: the features of more tiles than that are made fewer; None = they never are.
    """

    resolutions: tuple[Size, ...]
    tile: int
    grid: int
    most: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], sizes: VisionSizes, selection: Selection) -> Tiling:
        """Read `image_grid_pinpoints` and `vision_aspect_ratio`. Raises ModelError for values that
        are wrong, and for towers whose features are not those of all patches."""
        if sizes.num_positions - selection.drops_first != sizes.grid**2:
            expected = "default" if sizes.is_clip else "full"
            raise ModelError(
                "the checkpoint's tiles need one feature for each patch; set "
                f"vision_feature_select_strategy={expected!r} in its config"
            )
        asked = config.get("image_grid_pinpoints")
        if asked is None:
            asked = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
        side = sizes.image_size
        if not isinstance(asked, list) or not asked or not all(is_size(pair) for pair in asked):
            raise ModelError(
                f"the checkpoint's config has image_grid_pinpoints={asked!r}; expected a list of "
                "[height, width]"
            )
        if any(value % side for pair in asked for value in pair):
            raise ModelError(
                f"the checkpoint's config has image_grid_pinpoints={asked!r}; expected multiples of"
                f" the tower's image_size={side}"
            )
        resolutions = tuple((height, width) for height, width in asked)
        return cls(resolutions, side, sizes.grid, most_tiles(config))

    def best(self, size: Size) -> Size:
        """Return the resolution at which most of an image of this size is left, and of these the
        smallest one."""

        def loss(resolution: Size) -> tuple[int, int]:
            scale = min(resolution[1] / size[1], resolution[0] / size[0])
            left = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
            return -left, resolution[0] * resolution[1] - left

        return min(self.resolutions, key=loss)

    def tiles(self, size: Size) -> Size:
        """Return how many tiles are below and beside each other."""
        height, width = self.best(size)
        return height // self.tile, width // self.tile

    def padding(self, size: Size) -> Size:
        """Return how many patches at the top, and as many at the bottom, and how many at the left
        and at the right, show nothing of the image."""
        rows, columns = (count * self.grid for count in self.tiles(size))
        height, width = size
        if width / height > columns / rows:
            return (rows - int(round(height * (columns / width), 7))) // 2, 0
        return 0, (columns - int(round(width * (rows / height), 7))) // 2

    def lines(self, size: Size) -> Size:
        """Return the lines of features, and the features of a line, of the tiles of an image."""
        height, width = self.plane(size)
        if self.most is None:
            return height, width
        ratio = math.sqrt(height * width / (self.most * self.grid**2))
        return (int(height // ratio), int(width // ratio)) if ratio > 1.1 else (height, width)

    def plane(self, size: Size) -> Size:
        """Return the patches that show something of the image."""
        rows, columns = (count * self.grid for count in self.tiles(size))
        top, left = self.padding(size)
        return rows - 2 * top, columns - 2 * left


def most_tiles(config: Mapping[str, Any]) -> int | None:
    """Return the number in `vision_aspect_ratio`, "anyres_max_9". Raises ModelError for other
    values."""
    asked = config.get("vision_aspect_ratio")
    if asked is None:
        return None
    number = asked.removeprefix("anyres_max_") if isinstance(asked, str) else ""
    if number == asked or not number.isdecimal() or number == "0":
        raise ModelError(
            f"the checkpoint's config has vision_aspect_ratio={asked!r}; expected 'anyres_max_' and"
            " a number, such as 'anyres_max_9'"
        )
    return int(number)


def is_size(pair: Any) -> bool:
    """Return whether this is two positive whole numbers."""
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(type(value) is int and value > 0 for value in pair)
    )
