"""Makes of an image what GLM-4V-9B computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    PlacedItem,
    Placeholder,
    Processed,
)
from pegboard_model_glm4v.eva_sizes import POSITION, EvaSizes, tokens_of
from pegboard_models.patch_sizes import CLIP

if TYPE_CHECKING:
    from PIL.Image import Image

MEAN, DEVIATION = (np.array(each, np.float32)[:, None, None] for each in CLIP)


class SquareProcessor:
    """Every image is scaled to the same square. So all have as many tokens."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        sizes = EvaSizes.of(config)
        self.side = sizes.vision.image_size
        self.num_rows = sizes.num_rows
        self.begin, self.patch, self.end = tokens_of(config)
        self.marks = (self.begin, self.patch, self.end)
        texts = (setup.tokenizer.decode([token], skip_special_tokens=False) for token in self.marks)
        self.text = "".join(text.strip() for text in texts)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(self.text, self.marks)

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array is pixel_values, float32 [3, size, size]. There are no options. Raises
        RequestError."""
        from PIL.Image import Resampling

        if options:
            raise RequestError(
                f"mm_processor_kwargs has {', '.join(sorted(options))}; GLM-4V takes none. Leave "
                "them out",
                parameter="mm_processor_kwargs",
            )
        image = value.resize((self.side, self.side), Resampling.BICUBIC)
        colors = np.asarray(image, np.float32).transpose(2, 0, 1) / np.float32(255)
        pixels = np.ascontiguousarray((colors - MEAN) / DEVIATION)
        return Processed(self.token_ids(), {"pixel_values": pixels})

    def token_ids(self) -> list[int]:
        """Return the tokens of an image, all of which are rows."""
        return [self.begin, *[self.patch] * (self.num_rows - 2), self.end]

    def place_rows(self, modality: str, num_rows: int) -> Processed:
        if num_rows != self.num_rows:
            raise RequestError(
                f"an image has {num_rows} rows; this model's images have {self.num_rows}, with "
                "those before and after its patches"
            )
        return Processed(self.token_ids(), {})

    def inputs(
        self, token_ids: Sequence[int], items: Sequence[PlacedItem]
    ) -> Mapping[str, Sequence[int]]:
        """Return how far the position of each token is from its place. All patches of an image have
        one position, as in the published code."""
        moved = np.zeros(len(token_ids), np.int64)
        for item in items:
            first = item.start + 1
            last = item.stop - 1
            moved[first:last] -= np.arange(last - first)
            moved[last:] -= last - first - 1
        return {POSITION: moved.tolist()}
