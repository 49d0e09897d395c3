"""Makes of an image what BLIP-2 computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_model_blip2.sizes import IMAGE_TOKEN, queries_of, sizes_of
from pegboard_models.processing import ImageProcessor, square_pixels, token_of

if TYPE_CHECKING:
    from PIL.Image import Image


class Blip2Processor:
    """Every image has as many tokens."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        self.size = sizes_of(config).image_size
        self.num_rows = queries_of(config)
        self.token = token_of(config, "image", IMAGE_TOKEN)
        self.images = ImageProcessor(setup.checkpoint)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder("", (), is_first=True)

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array is pixel_values, float32 [3, size, size]."""
        pixels = self.images([value], options)["pixel_values"][0]
        arrays = {"pixel_values": square_pixels(pixels, self.size)}
        return Processed([self.token] * self.num_rows, arrays)
