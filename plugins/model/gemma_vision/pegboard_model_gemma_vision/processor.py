"""Makes of an image what Gemma 3 and PaliGemma compute with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import ModelError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_model_gemma_vision.sizes import (
    BEGIN_TOKEN,
    IMAGE_TOKEN,
    PALIGEMMA_IMAGE_TOKEN,
    pooled_side,
    sizes_of,
)
from pegboard_models.processing import ImageProcessor, square_pixels, token_id, token_of

if TYPE_CHECKING:
    from PIL.Image import Image

BEGIN = "<start_of_image>"
ROW = "<image_soft_token>"
END = "<end_of_image>"
PAN_AND_SCAN = {
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
"""Unless the options have other values. As in transformers, files of a checkpoint do not count."""


class Gemma3Processor:
    """An image is a text with a token for each row. With pan and scan, parts of the image follow
    it, each as an image of its own."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        sizes = sizes_of(config)
        self.token = token_of(config, "image", IMAGE_TOKEN)
        self.begin = token_of(config, "boi", BEGIN_TOKEN)
        self.size = sizes.image_size
        row = str(config.get("image_token") or ROW)
        self.one = f"\n\n{BEGIN}{row * pooled_side(config, sizes) ** 2}{END}\n\n"
        self.tokenizer = setup.tokenizer
        for text, expected in ((BEGIN, self.begin), (row, self.token)):
            if (known := token_id(setup.tokenizer, text)) != expected:
                raise ModelError(
                    f"the checkpoint's tokenizer has {text} as token {known}, and its config says "
                    f"{expected}; use the tokenizer of the model's repository"
                )
        self.images = ImageProcessor(setup.checkpoint)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(BEGIN, (self.begin,))

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array is pixel_values, float32 [1 + crops, 3, size, size]."""
        output = self.images([value], {**PAN_AND_SCAN, **options})
        pixels = square_pixels(output["pixel_values"], self.size)
        tokens = self.tokenizer.encode(self.text(len(pixels) - 1), add_special_tokens=False)
        return Processed(tokens, {"pixel_values": pixels}, np.array(tokens) == self.token)

    def text(self, num_crops: int) -> str:
        """Return the text of an image and its crops."""
        if not num_crops:
            return self.one
        return (
            f"Here is the original image {self.one} and here are some crops to help you see better "
            + " ".join([self.one] * num_crops)
        )


class PaliGemmaProcessor:
    """The token that begins a text comes after the image."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        sizes = sizes_of(config)
        self.token = token_of(config, "image", PALIGEMMA_IMAGE_TOKEN)
        self.size = sizes.image_size
        self.tokens = [self.token] * sizes.num_positions
        self.tokens.append(token_id(setup.tokenizer, "<bos>"))
        self.images = ImageProcessor(setup.checkpoint)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder("<image>", (self.token,))

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array is pixel_values, float32 [3, size, size]."""
        pixels = square_pixels(self.images([value], options)["pixel_values"][0], self.size)
        tokens = np.array(self.tokens)
        return Processed(self.tokens, {"pixel_values": pixels}, tokens == self.token)
