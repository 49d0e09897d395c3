"""What configs of Qwen-VL say. This module does not import torch, because processors read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard_models.patch_sizes import wrong

TOKENS = (151655, 151656)
"""Of an image and of a video, if the config does not say."""
TEXTS = (
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|vision_start|><|video_pad|><|vision_end|>",
)
"""What stands for an image and for a video."""
LATER_RATE = 4
"""Positions of a second, if the config of Qwen2.5-VL does not say."""


def rate_of(config: Mapping[str, Any], default: float) -> float:
    """Return the positions of a second that a vision_config says. Raises ModelError for other
    values."""
    rate = config.get("tokens_per_second", default)
    if type(rate) not in (int, float) or not 0 < rate < float("inf"):
        raise wrong("tokens_per_second", rate, "a number above 0")
    return float(rate)


def with_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with a text_config. Older checkpoints have its values beside the others."""
    if config.get("text_config"):
        return dict(config)
    text = {name: value for name, value in config.items() if name != "vision_config"}
    return {**config, "text_config": {**text, "architectures": ["Qwen2ForCausalLM"]}}
