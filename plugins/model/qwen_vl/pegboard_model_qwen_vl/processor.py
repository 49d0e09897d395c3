"""Makes of images and videos what Qwen-VL computes with."""

from __future__ import annotations

from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup, Video
from pegboard_model_qwen_vl.sizes import LATER_RATE, TEXTS, TOKENS, rate_of
from pegboard_models.patch_processor import PatchProcessor
from pegboard_models.patch_sizes import CLIP, video_defaults


class QwenVLProcessor(PatchProcessor):
    video_defaults = video_defaults(CLIP, 128 * 28 * 28, 768 * 28 * 28)
    tokens = TOKENS
    texts = TEXTS


class Qwen25VLProcessor(QwenVLProcessor):
    """The positions of a video know how much time is between its frames."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        super().__init__(options, setup)
        self.rate = rate_of(setup.checkpoint.config.get("vision_config") or {}, LATER_RATE)

    def interval(self, video: Video) -> float:
        return self.rate * self.frames / video.fps
