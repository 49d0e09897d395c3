"""Makes of an image what Chameleon computes with."""

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
from pegboard_model_chameleon.sizes import EncoderSizes, vocabulary_of
from pegboard_models.processing import (
    ImageProcessor,
    folder_of,
    json_object,
    square_pixels,
    token_id,
)

if TYPE_CHECKING:
    from PIL.Image import Image

MARK = "<image>"
NAMES = {"boi_token": "<racm3:break>", "eoi_token": "<eoss>", "sep_token": "<reserved08706>"}
"""The tokens before an image, after it, and before an answer, if tokenizer_config.json names
none."""


class ChameleonProcessor:
    """Every image has as many rows, between two tokens."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        sizes = EncoderSizes.of(config.get("vq_config") or {})
        self.size = sizes.resolution
        self.num_rows = sizes.num_rows
        tokens = vocabulary_of(config)
        if MARK not in tokens:
            raise ModelError(f"the checkpoint's vocabulary_map has no token {MARK!r}; add its id")
        self.token = tokens[MARK]
        path = folder_of(setup.checkpoint) / "tokenizer_config.json"
        given = json_object(path) if path.is_file() else {}
        names = {name: text_of(given.get(name)) or text for name, text in NAMES.items()}
        self.begin, self.end, self.separator = (
            token_id(setup.tokenizer, text) for text in names.values()
        )
        self.images = ImageProcessor(setup.checkpoint)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(MARK, (self.token,), ending=(self.separator,))

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array is pixel_values, float32 [3, size, size]."""
        pixels = self.images([value], options)["pixel_values"][0]
        arrays = {"pixel_values": square_pixels(pixels, self.size)}
        token_ids = [self.begin, *[self.token] * self.num_rows, self.end]
        is_row = np.array([False, *[True] * self.num_rows, False])
        return Processed(token_ids, arrays, is_row)


def text_of(token: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json: a string, or an object with it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None
