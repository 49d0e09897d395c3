"""What configs of Qwen-VL say. This module does not import torch, because processors read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard_models.patch_sizes import TowerSizes, check_heads, check_numbers, wrong

TOKENS = (151655, 151656)
"""Of an image and of a video, if the config does not say."""
TEXTS = (
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|vision_start|><|video_pad|><|vision_end|>",
)
"""What stands for an image and for a video."""
LATER_RATE = 4
"""Positions of a second, if the config of Qwen2.5-VL does not say."""
DEFAULTS: Mapping[str, Any] = {
    "depth": 32,
    "num_heads": 16,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
EARLIER: Mapping[str, Any] = {**DEFAULTS, "embed_dim": 1280, "mlp_ratio": 4, "hidden_size": 3584}
LATER: Mapping[str, Any] = {
    **DEFAULTS,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "out_hidden_size": 3584,
    "window_size": 112,
}
LATER_WHOLE = (7, 15, 23, 31)


@dataclass(frozen=True)
class QwenSizes:
    """window: rows of a window's side. whole: the layers that attend to all of the image instead of
    a window; None = all layers do, as in Qwen2-VL."""

    tower: TowerSizes
    window: int = 0
    whole: frozenset[int] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], *, is_later: bool) -> QwenSizes:
        """Read the vision_config. is_later: of Qwen2.5-VL. Raises ModelError for wrong values."""
        given = config.get("vision_config") or {}
        values = {**(LATER if is_later else EARLIER), **given}
        check_numbers(values, LATER if is_later else EARLIER)
        width = values["hidden_size" if is_later else "embed_dim"]
        patch = values["patch_size"]
        merge = values["spatial_merge_size"]
        check_heads(values["num_heads"], width)
        inner = values["intermediate_size"] if is_later else width * values["mlp_ratio"]
        rope = given.get("rope_parameters") or {}
        tower = TowerSizes(
            depth=values["depth"],
            num_heads=values["num_heads"],
            width=width,
            inner=inner,
            outer=values["out_hidden_size" if is_later else "hidden_size"],
            patch=patch,
            frames=values["temporal_patch_size"],
            merge=merge,
            activation=given.get("hidden_act") or ("silu" if is_later else "quick_gelu"),
            theta=float(rope.get("rope_theta") or 10000.0),
            is_gated=is_later,
        )
        if not is_later:
            return cls(tower)
        window = values["window_size"] // merge // patch
        if window < 1:
            expected = f"at least {patch * merge}, the pixels of {merge} patches"
            raise wrong("window_size", values["window_size"], expected)
        return cls(tower, window, whole_layers(given))


def whole_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers that `fullatt_block_indexes` names. Raises ModelError for other values."""
    asked = config.get("fullatt_block_indexes", LATER_WHOLE)
    if not isinstance(asked, list | tuple) or not all(type(layer) is int for layer in asked):
        raise wrong("fullatt_block_indexes", asked, "a list of layers")
    return frozenset(asked)


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
