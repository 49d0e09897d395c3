"""Makes of an image what Aria computes with."""

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
from pegboard_model_aria.sizes import IMAGE_TOKEN, queries_of, sizes_of
from pegboard_models.processing import ImageProcessor, token_of

if TYPE_CHECKING:
    from PIL.Image import Image


class AriaProcessor:
    """Each tile of an image has as many tokens."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        self.patch = sizes_of(config).patch_size
        self.queries = queries_of(config)
        self.token = token_of(config, "image", IMAGE_TOKEN)
        self.images = ImageProcessor(setup.checkpoint)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder("<fim_prefix><|img|><fim_suffix>", (self.token,))

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The arrays are pixel_values, float32 [tiles, 3, size, size], and patches, int64
        [tiles, 2]: how many of them have something of the image, below and beside each other."""
        output = self.images([value], options)
        pixels = np.ascontiguousarray(output["pixel_values"], dtype=np.float32)
        count = (pixels.shape[-1] // self.patch) ** 2
        if count not in self.queries:
            raise RequestError(
                f"a processed image has {count} patches; the model takes "
                f"{', '.join(map(str, self.queries))}. Use another max_image_size",
                parameter="mm_processor_kwargs",
            )
        mask = output["pixel_mask"]
        sides = np.stack([mask.any(2).sum(1), mask.any(1).sum(1)], 1)
        most = pixels.shape[-1] // self.patch
        patches = np.minimum(-(-sides // self.patch), most).astype(np.int64)
        arrays = {"pixel_values": pixels, "patches": patches}
        return replace(self.place_rows(modality, len(pixels) * self.queries[count]), arrays=arrays)

    def place_rows(self, modality: str, num_rows: int) -> Processed:
        return Processed([self.token] * num_rows, {})
