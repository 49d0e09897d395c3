"""Makes of an image what CLIP computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    PlacedItem,
    Placeholder,
    Processed,
)
from pegboard_model_clip.sizes import vision_sizes
from pegboard_models.processing import ImageProcessor, square_pixels

if TYPE_CHECKING:
    from PIL.Image import Image


class ClipProcessor:
    """An image is one token, in the place of those that an empty text has."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        self.size = vision_sizes(setup.checkpoint.config).image_size
        self.empty = tuple(setup.tokenizer.encode("", add_special_tokens=True))
        self.images = ImageProcessor(setup.checkpoint)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder("", self.empty, is_first=True)

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array is pixel_values, float32 [3, size, size]."""
        pixels = square_pixels(self.images([value], options)["pixel_values"][0], self.size)
        return Processed([self.empty[0] if self.empty else 0], {"pixel_values": pixels})

    def inputs(
        self, token_ids: Sequence[int], items: Sequence[PlacedItem]
    ) -> Mapping[str, Sequence[int]]:
        """Check that a prompt is a text or an image. Raises RequestError. The model has no inputs
        beside tokens."""
        if items and len(token_ids) > 1:
            raise RequestError(
                f"the prompt has {len(items)} images and {len(token_ids) - len(items)} tokens of "
                "text; CLIP makes a vector of one image, with an empty text, or of a text",
                parameter="multi_modal_data",
            )
        return {}
