"""Makes 16 mean colours of an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)


class ColoursProcessor:
    def __init__(self, options: None, setup: MultiModalProcessorSetup) -> None:
        self._token = int(setup.checkpoint.config["image_token_id"])

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder("<image>", (self._token,))

    def process(self, modality: str, value: Any, options: Mapping[str, Any]) -> Processed:
        """See `MultiModalProcessor.process`. arrays: "colours", float32 [16, 3], 0 … 1."""
        if options:
            raise RequestError(
                f"mm_processor_kwargs: there are no options, got {min(options)!r}",
                parameter="mm_processor_kwargs",
            )
        small = value.resize((4, 4), Image.Resampling.BOX)
        colours = np.asarray(small, np.float32).reshape(16, 3) / 255
        return Processed([self._token] * 16, {"colours": colours})
