"""Makes of an image what InternVL computes with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_model_internvl.sizes import IMAGE_TOKEN, scale_of, sizes_of
from pegboard_models.processing import ImageProcessor, square_pixels, token_id, token_of

if TYPE_CHECKING:
    from PIL.Image import Image

MARK = "<IMG_CONTEXT>"
START = "<img>"
END = "</img>"


class InternVLProcessor:
    """The rows of all tiles, and of the image as a whole if it has several, are between two tokens
    that are no rows."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        sizes = sizes_of(config)
        self.token = token_of(config, "image", IMAGE_TOKEN)
        self.size = sizes.image_size
        self.num_rows = sizes.merged(scale_of(config))
        self.start = token_id(setup.tokenizer, START)
        self.end = token_id(setup.tokenizer, END)
        self.images = ImageProcessor(setup.checkpoint)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(MARK, (self.token,))

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array is pixel_values, float32 [tiles, 3, size, size]. crop_to_patches is on, unless
        options turn it off."""
        output = self.images([value], {"crop_to_patches": True, **options})
        pixels = square_pixels(output["pixel_values"], self.size)
        placed = self.place_rows(modality, len(pixels) * self.num_rows)
        return replace(placed, arrays={"pixel_values": pixels})

    def place_rows(self, modality: str, num_rows: int) -> Processed:
        tokens = [self.start, *[self.token] * num_rows, self.end]
        return Processed(tokens, {}, np.array(tokens) == self.token)
