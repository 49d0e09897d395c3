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
from pegboard_model_internvl.sizes import IMAGE_TOKEN, scale_of, sizes_of, standard
from pegboard_model_internvl.tiles import Tiles, image_values
from pegboard_models.processing import ImageProcessor, square_pixels, token_id, token_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from pegboard.interfaces.tokenizer import Tokenizer

MARK = "<IMG_CONTEXT>"
START = "<img>"
END = "</img>"


class InternVLProcessor:
    """The rows of all tiles, and of the image as a whole if it has several, are between two tokens
    that are no rows."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        self.read(setup)

    def read(self, setup: MultiModalProcessorSetup) -> None:
        """Read the checkpoint."""
        config = setup.checkpoint.config
        self.token = token_of(config, "image", IMAGE_TOKEN)
        self.images = ImageProcessor(setup.checkpoint)
        self.read_sizes(config, setup.tokenizer)

    def read_sizes(self, config: Mapping[str, Any], tokenizer: "Tokenizer") -> None:
        """Read what an image becomes. config: in transformers' form."""
        sizes = sizes_of(config)
        self.size = sizes.image_size
        self.num_rows = sizes.merged(scale_of(config))
        self.start = token_id(tokenizer, START)
        self.end = token_id(tokenizer, END)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(MARK, (self.token,))

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array is pixel_values, float32 [tiles, 3, size, size]. Images are cut into tiles,
        unless options turn it off."""
        pixels = self.tiles(value, options)
        placed = self.place_rows(modality, len(pixels) * self.num_rows)
        return replace(placed, arrays={"pixel_values": pixels})

    def tiles(self, value: "Image", options: Mapping[str, Any]) -> np.ndarray:
        """Return the pixels of the tiles, float32 [tiles, 3, size, size]."""
        output = self.images([value], {"crop_to_patches": True, **options})
        return square_pixels(output["pixel_values"], self.size)

    def place_rows(self, modality: str, num_rows: int) -> Processed:
        tokens = [self.start, *[self.token] * num_rows, self.end]
        return Processed(tokens, {}, np.array(tokens) == self.token)


class InternVLChatProcessor(InternVLProcessor):
    """For the form that InternVL's authors publish. Its config says how images are cut. The
    preprocessor_config.json of these checkpoints is that of CLIP, and is not read."""

    def read(self, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        self.read_sizes(standard(config), setup.tokenizer)
        self.token = token_id(setup.tokenizer, MARK)
        self.settings = Tiles.of(config)
        self.images = ImageProcessor(setup.checkpoint, image_values(self.size))

    def tiles(self, value: "Image", options: Mapping[str, Any]) -> np.ndarray:
        settings = self.settings.changed(options)
        output = self.images([value], settings.options())
        pixels = square_pixels(output["pixel_values"], self.size)
        has_whole = len(pixels) > 1
        return pixels if settings.use_thumbnail or not has_whole else pixels[:-1]
