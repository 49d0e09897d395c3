"""Makes of images and videos what Qwen3-VL computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
    Video,
)
from pegboard_model_qwen_vl.processor import LIMITS, QwenVLProcessor
from pegboard_model_qwen_vl.sizes import video_defaults
from pegboard_models.processing import token_id
from pegboard_models.videos import Size, fitted

START = "<|vision_start|>"
END = "<|vision_end|>"


class Qwen3VLProcessor(QwenVLProcessor):
    """A video is like an image for every two frames, each of them behind its time as text. Limits
    of pixels are those of all frames together."""

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
        patches, (count, height, width) = self.patches(value, options)
        shape = 1, height // self.merge, width // self.merge
        num_rows = shape[1] * shape[2]
        token_ids: list[int] = []
        grids: list[tuple[int, tuple[int, int, int]]] = []
        for seconds in times(value.seconds, self.frames):
            text = self.tokenizer.encode(f"<{seconds:.1f} seconds>", add_special_tokens=False)
            token_ids += [*text, self.start]
            grids.append((len(token_ids), shape))
            token_ids += [*[self.video_token] * num_rows, self.end]
        is_row = np.zeros(len(token_ids), bool)
        for first, _ in grids:
            is_row[first : first + num_rows] = True
        grid = np.array([count, height, width], np.int64)
        arrays = {"pixel_values_videos": patches, "video_grid_thw": grid}
        return Processed(token_ids, arrays, is_row, {"grids": grids})

    def fitted(self, count: int, size: Size, limits: Mapping[str, int]) -> Size:
        factor = self.patch * self.merge
        scale = max(1.0, factor / size[0], factor / size[1])
        larger = (int(size[0] * scale), int(size[1] * scale)) if scale > 1 else size
        least, most = (limits[name] for name in LIMITS.values())
        frames = max(count, self.frames)
        return fitted(
            larger, factor, least, most, frames, round(frames / self.frames) * self.frames
        )


def times(seconds: Sequence[float], frames: int) -> list[float]:
    """Return the time of each patch of `frames` frames: between that of the first and that of the
    last of them."""
    known = [*seconds, *[seconds[-1]] * (-len(seconds) % frames)]
    starts = range(0, len(known), frames)
    return [(known[start] + known[start + frames - 1]) / 2 for start in starts]
