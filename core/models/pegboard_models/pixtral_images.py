"""The processor of images of any size (Pixtral). It does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_models.given_forms import numbers_of, wrong_rows
from pegboard_models.processing import ImageProcessor, processor_values, token_id, token_of
from pegboard_models.vision_sizes import VisionSizes, merge_size

if TYPE_CHECKING:
    from PIL.Image import Image

MARKS = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
"""The names of a processor's tokens, and their texts if its file has none."""


class PixtralProcessor:
    """The tokens of an image are those of its lines of patches. A token that is no row ends each
    line. image_token, merged: if the config names none."""

    image_token: int | None = None
    merged = 1

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        sizes = VisionSizes.of(config.get("vision_config") or {}, ("pixtral",))
        self.token = token_of(config, "image", self.image_token)
        marks = {**MARKS, **processor_values(setup.checkpoint)}
        self.text = str(marks["image_token"])
        self.line_end = token_id(setup.tokenizer, str(marks["image_break_token"]))
        self.image_end = token_id(setup.tokenizer, str(marks["image_end_token"]))
        self.side = sizes.patch_size * merge_size(config, self.merged)
        self.images = ImageProcessor(setup.checkpoint)
        self.images.fix("patch_size", {"height": self.side, "width": self.side})

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(self.text, (self.token,))

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array is pixel_values, float32 [3, height, width], of a size that `side` divides."""
        pixels = self.images([value], options)["pixel_values"][0]
        if any(size % self.side for size in pixels.shape[1:]):
            raise RequestError(
                f"the processed image has shape {list(pixels.shape)}; its sides must be multiples "
                f"of {self.side}. Leave do_resize on, or send an image of such a size",
                parameter="mm_processor_kwargs",
            )
        arrays = {"pixel_values": np.ascontiguousarray(pixels, dtype=np.float32)}
        placed = self.placed(*(size // self.side for size in pixels.shape[1:]))
        return replace(placed, arrays=arrays)

    def placed(self, height: int, width: int) -> Processed:
        """Return the tokens of an image of so many lines and columns of rows."""
        line = [self.token] * width + [self.line_end]
        tokens = [*(line * height)[:-1], self.image_end]
        return Processed(tokens, {}, np.array(tokens) == self.token)

    def place_formed_rows(
        self, modality: str, num_rows: int, form: Mapping[str, np.ndarray]
    ) -> Processed:
        """The form of an image is image_sizes, int64 [2]: the height and the width of the
        processed image, in pixels."""
        meaning = f"image_sizes, (height, width) in pixels, multiples of {self.side}"
        sizes = numbers_of(form, {"image_sizes": 2}, meaning)
        height, width = (size // self.side for size in sizes)
        if any(size % self.side for size in sizes) or height * width != num_rows:
            raise wrong_rows(
                num_rows, f"{meaning}, with a row for every {self.side} × {self.side}, got {sizes}"
            )
        return self.placed(height, width)
