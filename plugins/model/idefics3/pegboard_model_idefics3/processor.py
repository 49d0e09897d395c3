"""Makes of an image what Idefics 3 and SmolVLM compute with."""

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
from pegboard_model_idefics3.sizes import IMAGE_TOKEN, scale_of, sizes_of
from pegboard_models.given_forms import numbers_of, wrong_rows
from pegboard_models.processing import ImageProcessor, square_pixels, token_of

if TYPE_CHECKING:
    from PIL.Image import Image

FRAME = "<fake_token_around_image>"
WHOLE = "<global-img>"
MARK = "<image>"


class Idefics3Processor:
    """The text of an image has the place of each tile, and then the whole image. Its tokens are
    those of this text."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        sizes = sizes_of(config)
        self.token = token_of(config, "image", IMAGE_TOKEN)
        self.size = sizes.image_size
        self.num_rows = sizes.merged(scale_of(config))
        self.rows = MARK * self.num_rows
        self.tokenizer = setup.tokenizer
        self.images = ImageProcessor(setup.checkpoint)
        self.images.fix("return_row_col_info", True)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(MARK, (self.token,))

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array is pixel_values, float32 [tiles + 1, 3, size, size]."""
        output = self.images([value], options)
        pixels = square_pixels(output["pixel_values"][0], self.size)
        placed = self.placed(int(output["rows"][0][0]), int(output["cols"][0][0]))
        return replace(placed, arrays={"pixel_values": pixels})

    def placed(self, height: int, width: int) -> Processed:
        """Return the tokens of an image of this many tiles below and beside each other."""
        tokens = self.tokenizer.encode(self.text(height, width), add_special_tokens=False)
        return Processed(tokens, {}, np.array(tokens) == self.token)

    def place_formed_rows(
        self, modality: str, num_rows: int, form: Mapping[str, np.ndarray]
    ) -> Processed:
        """The form of an image is rows and cols, int64 [1]: how many tiles are below and beside
        each other, 0 if the image is not cut."""
        meaning = "rows and cols, the numbers of tiles below and beside each other"
        height, width = numbers_of(form, {"rows": 1, "cols": 1}, meaning)
        if (height > 0) != (width > 0) or (height * width + 1) * self.num_rows != num_rows:
            raise wrong_rows(
                num_rows,
                f"{self.num_rows} for each of rows × cols tiles and for the whole image, got "
                f"{height} × {width}",
            )
        return self.placed(height, width)

    def text(self, height: int, width: int) -> str:
        """Return the text of an image of this many tiles below and beside each other."""
        lines = [
            "".join(f"{FRAME}<row_{row}_col_{column}>{self.rows}" for column in range(1, width + 1))
            for row in range(1, height + 1)
        ]
        tiles = "".join(f"{line}\n" for line in lines)
        return f"{tiles}{chr(10) if tiles else ''}{FRAME}{WHOLE}{self.rows}{FRAME}"
