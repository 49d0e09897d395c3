"""What configs of Qwen-VL say. This module does not import torch, because processors read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError

AXES = ("rope_time", "rope_height", "rope_width")
"""The axes of positions, in the order of the sections of the rotary embedding."""
IMAGE_TOKEN = 151655
VIDEO_TOKEN = 151656
LATER_RATE = 4
"""Positions of a second, if the config of Qwen2.5-VL does not say."""
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of the colors of CLIP's images."""
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
    instead of a window; None = all layers do, as in Qwen2-VL. names: of the two matrices of the
    feed-forward blocks without a gate."""

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
    names: tuple[str, str] = ("fc1", "fc2")

    @classmethod
    def of(cls, config: Mapping[str, Any], *, is_later: bool) -> TowerSizes:
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


def check_numbers(values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ModelError for values that are not whole numbers from 1 on."""
    for name in names:
        if type(values[name]) is not int or values[name] < 1:
            raise wrong(name, values[name], "a whole number from 1 on")


def check_heads(count: int, width: int) -> None:
    """Raise ModelError for heads whose channels two axes cannot share."""
    if width % (4 * count):
        raise wrong("num_heads", count, f"a divisor of a quarter of {width}")


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


def video_defaults(
    colors: tuple[Sequence[float], Sequence[float]], least: int, most: int
) -> dict[str, Any]:
    """Return how videos are processed if no file says. colors: mean and standard deviation. least,
    most: pixels."""
    return {
        "do_resize": True,
        "size": {"shortest_edge": least, "longest_edge": most},
        "resample": 3,  # Pillow's bicubic filter
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": colors[0],
        "image_std": colors[1],
    }


def wrong(name: str, value: object, expected: str) -> ModelError:
    """Return the error of a value of the vision_config."""
    return ModelError(f"the checkpoint's vision_config has {name}={value!r}; expected {expected}")


def with_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with a text_config. Older checkpoints have its values beside the others."""
    if config.get("text_config"):
        return dict(config)
    text = {name: value for name, value in config.items() if name != "vision_config"}
    return {**config, "text_config": {**text, "architectures": ["Qwen2ForCausalLM"]}}
