"""Makes of images and videos what GLM-4V computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Processed,
    Video,
)
from pegboard_models.patch_processor import TimedProcessor
from pegboard_models.patch_sizes import CLIP, video_defaults
from pegboard_models.processing import FILES, folder_of, json_object, token_id

START = "<|begin_of_image|>"
END = "<|end_of_image|>"
TENTHS = "Glm46VProcessor"
"""The processor_class of checkpoints whose times have tenths of seconds."""
TENTHS_TYPE = "glm46v"
"""The model type of such checkpoints, if their files name no processor_class."""


class Glm4vProcessor(TimedProcessor):
    """The rows of a video have the token of images."""

    video_defaults = video_defaults(CLIP, 112 * 112, 28 * 28 * 2 * 30000)
    tokens = (151343, 151344)
    texts = (f"{START}<|image|>{END}", "<|begin_of_video|><|video|><|end_of_video|>")

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        super().__init__(options, setup)
        self.tokenizer = setup.tokenizer
        self.start = token_id(setup.tokenizer, START)
        self.end = token_id(setup.tokenizer, END)
        files = [folder_of(setup.checkpoint) / name for name in FILES]
        files_values = [json_object(path) for path in files if path.is_file()]
        classes = [values.get("processor_class") for values in files_values]
        named = [name for name in classes if name]
        has_type = setup.checkpoint.config.get("model_type") == TENTHS_TYPE
        self.has_tenths = TENTHS in named if named else has_type

    def video(self, value: Video, options: Mapping[str, Any]) -> Processed:
        return self.timed(value, options, self.frame)

    def frame(self, seconds: Sequence[float]) -> tuple[Sequence[int], int, Sequence[int]]:
        """The time of some frames is that of the first of them."""
        first = seconds[0]
        text = f"{first:.1f} seconds" if self.has_tenths else str(int(first))
        time = self.tokenizer.encode(text, add_special_tokens=False)
        return [self.start], self.token, [self.end, *time]
