"""Makes of an image what Molmo computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_model_molmo.crops import Crops
from pegboard_model_molmo.sizes import TowerSizes
from pegboard_model_molmo.values import MAX_CROPS, MOST, is_count
from pegboard_models.processing import token_id

if TYPE_CHECKING:
    from PIL.Image import Image

BEGIN = "<|endoftext|>"
"""The token that begins every prompt."""
TOKENS = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>")


class MolmoProcessor:
    """Images come before the text of a prompt. Each line of rows has a token at its end."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        sizes = TowerSizes.of(setup.checkpoint.config)
        self.crops = Crops.of(setup.checkpoint, sizes)
        self.begin = token_id(setup.tokenizer, BEGIN)
        names = (token_id(setup.tokenizer, text) for text in TOKENS)
        self.start, self.end, self.patch, self.column = names

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder("", (self.begin,), is_first=True, beginning=(self.begin,))

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The arrays are pixel_values, float32 [crops, patches, patch · patch · 3], masks, float32
        [crops, patches], and places, int64 [rows] (see `Crops`). Options: max_crops. Raises
        RequestError."""
        tiling = self.crops.tiling((value.height, value.width), most_of(options, self.crops.most))
        pixels, masks = self.crops.cut(value, tiling)
        places = self.crops.places(tiling)
        side = self.crops.lines((1, 1))[0]
        token_ids = [*self.plane(side, side), *self.plane(*self.crops.lines(tiling))]
        arrays = {"pixel_values": pixels, "masks": masks, "places": places}
        return Processed(token_ids, arrays, np.array(token_ids) == self.patch)

    def plane(self, lines: int, columns: int) -> list[int]:
        """Return the tokens of lines of rows."""
        line = [self.patch] * columns + [self.column]
        return [self.start, *line * lines, self.end]

    def rewritten(self, text: str) -> str:
        """Return the text with a space before it, which the model has learned from."""
        return text if text.startswith(" ") else f" {text}"

    def padded(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens with the one that begins every prompt."""
        return token_ids if [*token_ids[:1]] == [self.begin] else [self.begin, *token_ids]


def most_of(options: Mapping[str, Any], default: int) -> int:
    """Return how many crops an image may have. Raises RequestError."""
    if unknown := sorted(options.keys() - {MAX_CROPS}):
        raise RequestError(
            f"mm_processor_kwargs has {', '.join(unknown)}; Molmo takes {MAX_CROPS}",
            parameter="mm_processor_kwargs",
        )
    most = options.get(MAX_CROPS, default)
    if not is_count(most):
        raise RequestError(
            f"mm_processor_kwargs has {MAX_CROPS}={most!r}; expected a whole number from 1 to "
            f"{MOST}",
            parameter="mm_processor_kwargs",
        )
    return int(most)
