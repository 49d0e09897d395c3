"""Makes of an image what DeepSeek-VL2 computes with."""

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
from pegboard_model_deepseek_vl.images import (
    Colors,
    blamed_on,
    changed,
    check_same,
    file_values,
    mark_of,
    tiles_of,
    wrong,
)
from pegboard_model_deepseek_vl.sizes import is_head, projector_of, side_of, tower_of
from pegboard_models.anyres import Tiling, is_size
from pegboard_models.processing import token_id

if TYPE_CHECKING:
    from PIL.Image import Image


MOST_CUT = 2
"""The most images of a prompt that are cut into tiles."""


class MarkedImages:
    """Images whose tokens are all those of their mark. values: what the checkpoint's files say of
    images."""

    def __init__(self, setup: MultiModalProcessorSetup) -> None:
        self.values = file_values(setup.checkpoint)
        self.mark = mark_of(self.values)
        self.token = token_id(setup.tokenizer, self.mark)
        self.colors = Colors.of(self.values)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(self.mark, (self.token,))

    def place_rows(self, modality: str, num_rows: int) -> Processed:
        return Processed([self.token] * num_rows, {})


class DeepseekVL2Processor(MarkedImages):
    """An image is seen as a whole and as tiles. Each line of rows ends with one more row, and one
    row is between the whole and the tiles."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        super().__init__(setup)
        config = setup.checkpoint.config
        values = self.values
        tower = tower_of(config)
        projector = projector_of(config, tower.hidden_size)
        is_head(config)
        check_same(values, {"patch_size": tower.patch_size})
        if not projector.is_linear:
            check_same(values, {"downsample_ratio": projector.ratio})
        self.side = side_of(tower, projector)
        self.size = tower.image_size
        name = "candidate_resolutions"
        asked = values.get(name, config.get(name, [[self.size] * 2]))
        if (
            not isinstance(asked, list)
            or not asked
            or not all(is_size(pair) for pair in asked)
            or any(length % self.size for pair in asked for length in pair)
        ):
            raise wrong(name, asked, f"pairs of multiples of the tower's image_size={self.size}")
        resolutions = tuple((height, width) for width, height in asked)
        self.tiling = Tiling(resolutions, self.size, self.side)

    def counted_options(self, counts: Mapping[str, int]) -> Mapping[str, Any]:
        return {"cropping": False} if counts.get("image", 0) > MOST_CUT else {}

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The arrays are pixel_values, float32 [1 + tiles, 3, size, size], the whole image and its
        tiles, and tiles, int64 [2]: how many of them are below and beside each other. With the
        option cropping=False, there is one tile."""
        cropping = changed({"cropping": True}, options, "DeepSeek-VL2")["cropping"]
        if type(cropping) is not bool:
            raise RequestError(
                f"mm_processor_kwargs has cropping={cropping!r}; expected true or false",
                parameter="mm_processor_kwargs",
            )
        size = self.size
        height, width = self.tiling.best((value.height, value.width)) if cropping else (size, size)
        with blamed_on(value):
            whole = self.colors.framed(value, size, size)
            canvas = self.colors.framed(value, width, height)
        pixels = self.colors.pixels([whole, *tiles_of(canvas, size)])
        below = height // size
        beside = width // size
        num_rows = self.side * (self.side + 1) + 1
        num_rows += below * self.side * (beside * self.side + 1)
        arrays = {"pixel_values": pixels, "tiles": np.array([below, beside], np.int64)}
        return replace(self.place_rows(modality, num_rows), arrays=arrays)
