"""Makes of an image what Llama 4 computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_model_llama4.sizes import IMAGE_TOKEN, Llama4Sizes
from pegboard_model_llama4.tiles import DEFAULTS, Size, cut
from pegboard_models.processing import described, token_id, token_of

if TYPE_CHECKING:
    from PIL.Image import Image

MARK = "<|image|>"
MOST = 64
"""The most tiles that a request may ask for."""


class Llama4Processor:
    """Each tile of an image has its rows, and the places of tiles are tokens between them."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        sizes = Llama4Sizes.of(config)
        self.side = sizes.tower.image_size
        self.num_rows = sizes.num_rows
        self.token = token_of(config, "image", IMAGE_TOKEN)
        self.mark = token_id(setup.tokenizer, MARK)
        names = ("image_start", "image_end", "tile_x_separator", "tile_y_separator")
        self.start, self.end, self.beside, self.below = (
            token_id(setup.tokenizer, f"<|{name}|>") for name in names
        )
        self.values = described(setup.checkpoint, "image_processor", DEFAULTS)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(MARK, (self.mark,))

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array is pixel_values, float32 [tiles, 3, size, size]."""
        check(options)
        pixels, counts = cut(value, self.side, {**self.values, **options})
        tokens = self.tokens(counts)
        return Processed(tokens, {"pixel_values": pixels}, np.array(tokens) == self.token)

    def tokens(self, counts: Size) -> list[int]:
        """Return the tokens of an image. counts: its tiles below and beside each other."""
        rows = [self.token] * self.num_rows
        line = [*rows, *[self.beside, *rows] * (counts[1] - 1), self.below]
        tiles = line * counts[0] if counts != (1, 1) else []
        return [self.start, *tiles, self.mark, *rows, self.end]


def check(options: Mapping[str, Any]) -> None:
    """Raise RequestError for options of another name, and for wrong values."""
    if unknown := sorted({*options} - {"max_patches", "resize_to_max_canvas"}):
        raise wrong(
            f"{', '.join(unknown)}; the image processor takes max_patches, resize_to_max_canvas"
        )
    most = options.get("max_patches", 1)
    if type(most) is not int or not 1 <= most <= MOST:
        raise wrong(f"max_patches={most!r}; expected a whole number from 1 to {MOST}")
    if type(largest := options.get("resize_to_max_canvas", True)) is not bool:
        raise wrong(f"resize_to_max_canvas={largest!r}; expected true or false")


def wrong(problem: str) -> RequestError:
    """Return the error of an option."""
    return RequestError(f"mm_processor_kwargs has {problem}", parameter="mm_processor_kwargs")
