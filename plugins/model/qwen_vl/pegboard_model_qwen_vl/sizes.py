"""What configs of Qwen-VL say. This module does not import torch, because processors read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError

AXES = ("rope_time", "rope_height", "rope_width")
"""The axes of positions, in the order of the sections of the rotary embedding."""
IMAGE_TOKEN = 151655
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
class TowerSizes:
    """width: of the vectors of patches. inner: of the feed-forward blocks. outer: of the rows that
    the tower makes. patch: pixels of a patch's side. frames: of a patch. merge: patches of a row's
    side. window: rows of a window's side. whole: the layers that attend to all of the image
    instead of a window; None = all layers do, as in Qwen2-VL."""

    depth: int
    num_heads: int
    width: int
    inner: int
    outer: int
    patch: int
    frames: int
    merge: int
    activation: str
    theta: float
    window: int = 0
    whole: frozenset[int] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], *, is_later: bool) -> TowerSizes:
        """Read the vision_config. is_later: of Qwen2.5-VL. Raises ModelError for wrong values."""
        given = config.get("vision_config") or {}
        values = {**(LATER if is_later else EARLIER), **given}
        for name in LATER if is_later else EARLIER:
            if type(values[name]) is not int or values[name] < 1:
                raise wrong(name, values[name], "a whole number from 1 on")
        width = values["hidden_size" if is_later else "embed_dim"]
        patch = values["patch_size"]
        merge = values["spatial_merge_size"]
        if width % (4 * values["num_heads"]):
            raise wrong("num_heads", values["num_heads"], f"a divisor of a quarter of {width}")
        inner = values["intermediate_size"] if is_later else width * values["mlp_ratio"]
        rope = given.get("rope_parameters") or {}
        sizes = cls(
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
            window=values["window_size"] // merge // patch if is_later else 0,
            whole=whole_layers(given) if is_later else None,
        )
        if is_later and sizes.window < 1:
            expected = f"at least {patch * merge}, the pixels of {merge} patches"
            raise wrong("window_size", values["window_size"], expected)
        return sizes


def whole_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers that `fullatt_block_indexes` names. Raises ModelError for other values."""
    asked = config.get("fullatt_block_indexes", LATER_WHOLE)
    if not isinstance(asked, list | tuple) or not all(type(layer) is int for layer in asked):
        raise wrong("fullatt_block_indexes", asked, "a list of layers")
    return frozenset(asked)


def wrong(name: str, value: object, expected: str) -> ModelError:
    """Return the error of a value of the vision_config."""
    return ModelError(f"the checkpoint's vision_config has {name}={value!r}; expected {expected}")


def with_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with a text_config. Older checkpoints have its values beside the others."""
    if config.get("text_config"):
        return dict(config)
    text = {name: value for name, value in config.items() if name != "vision_config"}
    return {**config, "text_config": {**text, "architectures": ["Qwen2ForCausalLM"]}}
