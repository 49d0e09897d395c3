"""Makes of images and videos what Qwen3-VL computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
    Video,
)
from pegboard_model_qwen_vl.sizes import TEXTS, TOKENS
from pegboard_models.patch_processor import TimedProcessor
from pegboard_models.patch_sizes import video_defaults
from pegboard_models.processing import token_id

START = "<|vision_start|>"
END = "<|vision_end|>"


class Qwen3VLProcessor(TimedProcessor):
    tokens = TOKENS
    texts = TEXTS
    patch = 16
    video_defaults = video_defaults(((0.5,) * 3, (0.5,) * 3), 128 * 32 * 32, 768 * 32 * 32)

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        super().__init__(options, setup)
        self.tokenizer = setup.tokenizer
        config = setup.checkpoint.config
        self.start, self.end = (
            config[name] if type(config.get(name)) is int else token_id(setup.tokenizer, text)
            for name, text in (("vision_start_token_id", START), ("vision_end_token_id", END))
        )

    def placeholder(self, modality: str) -> Placeholder:
        if modality == "image":
            return super().placeholder(modality)
        return Placeholder(f"{START}<|video_pad|>{END}", (self.start, self.video_token, self.end))

    def video(self, value: Video, options: Mapping[str, Any]) -> Processed:
        return self.timed(value, options, self.frame)

    def frame(self, seconds: Sequence[float]) -> tuple[Sequence[int], int, Sequence[int]]:
        """The time of some frames is between that of the first and that of the last of them."""
        text = f"<{(seconds[0] + seconds[-1]) / 2:.1f} seconds>"
        time = self.tokenizer.encode(text, add_special_tokens=False)
        return [*time, self.start], self.video_token, [self.end]
