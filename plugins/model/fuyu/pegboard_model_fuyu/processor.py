"""Makes of an image what Fuyu computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_model_fuyu.sizes import IMAGE_TOKEN, patch_of
from pegboard_models.processing import ImageProcessor, token_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from pegboard.interfaces.tokenizer import Tokenizer

ANSWER = ("<0x04>", "\x04")
"""How the token before an answer is written: as a special token, or as a byte."""


class FuyuProcessor:
    """Each line of patches has a token at its end."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        self.patch = patch_of(config)
        self.token = token_of(config, "image", IMAGE_TOKEN)
        self.newline = token_after(setup.tokenizer, ("|NEWLINE|",))
        self.begin = token_after(setup.tokenizer, ("<s>",))
        self.first = tuple(setup.tokenizer.encode("", add_special_tokens=True))
        self.ending = (token_after(setup.tokenizer, ANSWER),)
        self.images = ImageProcessor(setup.checkpoint)
        self.images.refuse("patch_size")

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder("", self.first, is_first=True, ending=self.ending)

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array is patches, float32 [patches, patch · patch · 3]."""
        output = self.images([value], options)
        image = np.asarray(output["images"], np.float32)[0, 0]
        shown = (output["image_unpadded_heights"], output["image_unpadded_widths"])
        height, width = (-(-int(np.asarray(each)[0, 0]) // self.patch) for each in shown)
        lines = min(height, image.shape[1] // self.patch)
        columns = min(width, image.shape[2] // self.patch)
        if not lines * columns:
            raise RequestError(
                f"the processed image has {image.shape[2]} × {image.shape[1]} pixels; a patch has "
                f"{self.patch} × {self.patch}. Leave out do_pad, or ask for a larger size",
                parameter="mm_processor_kwargs",
            )
        cut = image[:, : lines * self.patch, : columns * self.patch]
        blocks = cut.reshape(3, lines, self.patch, columns, self.patch).transpose(1, 3, 2, 4, 0)
        patches = np.ascontiguousarray(blocks.reshape(lines * columns, -1))
        token_ids = [*([self.token] * columns + [self.newline]) * lines, self.begin]
        is_row = np.array([*([True] * columns + [False]) * lines, False])
        return Processed(token_ids, {"patches": patches}, is_row)


def token_after(tokenizer: "Tokenizer", texts: tuple[str, ...]) -> int:
    """Return the token that is written as one of the texts. The tokenizer may put a space before
    it. Raises ModelError if there is none."""
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        last = tokenizer.decode(ids[-1:], skip_special_tokens=False)
        if 1 <= len(ids) <= 2 and (last in texts or last.strip() in texts):
            return ids[-1]
    raise ModelError(
        f"the checkpoint's tokenizer has no token {texts[0]!r}. Use the tokenizer of the model's "
        "repository"
    )
