"""What configs of towers with windows say: those of Qwen2-VL (Wang et al. 2024) and Qwen2.5-VL (Bai
et al. 2025). This module does not import torch, because processors read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard_models.patch_sizes import TowerSizes, check_heads, check_numbers, wrong

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
class WindowSizes:
    """window: rows of a window's side. whole: the layers that attend to all of the image instead of
    a window; None = all layers do, as in Qwen2-VL."""

    tower: TowerSizes
    window: int = 0
    whole: frozenset[int] | None = None

    @classmethod
    def of(
        cls, config: Mapping[str, Any], *, is_later: bool, qkv: tuple[str, ...] = ("qkv",)
    ) -> WindowSizes:
        """Read the vision_config. is_later: of Qwen2.5-VL. qkv: see `TowerSizes`. Raises ModelError
        for wrong values."""
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
            qkv=qkv,
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
