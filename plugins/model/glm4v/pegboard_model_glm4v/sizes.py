"""What configs of GLM-4V say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.layers.config import rope_parameters, size_of
from pegboard_models.patch_sizes import TowerSizes, check_heads, check_numbers, wrong

NUMBERS: Mapping[str, Any] = {
    "depth": 24,
    "num_heads": 12,
    "hidden_size": 1536,
    "intermediate_size": 13696,
    "out_hidden_size": 4096,
    "image_size": 336,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
VALUES: Mapping[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False}
SECTIONS = [8, 12, 12]
"""The pairs of channels of each axis, if the config does not say."""


@dataclass(frozen=True)
class Glm4vSizes:
    """inner: of the block that makes rows. side: of the square of learned positions."""

    tower: TowerSizes
    inner: int
    side: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Glm4vSizes:
        """Read the vision_config. Raises ModelError for wrong values."""
        given = config.get("vision_config") or {}
        values = {**NUMBERS, **VALUES, **given}
        check_numbers(values, NUMBERS)
        check_heads(values["num_heads"], values["hidden_size"])
        if values["image_size"] < values["patch_size"]:
            expected = f"at least patch_size={values['patch_size']}"
            raise wrong("image_size", values["image_size"], expected)
        rope = given.get("rope_parameters") or {}
        tower = TowerSizes(
            depth=values["depth"],
            num_heads=values["num_heads"],
            width=values["hidden_size"],
            inner=values["out_hidden_size"],
            outer=values["out_hidden_size"],
            patch=values["patch_size"],
            frames=values["temporal_patch_size"],
            merge=values["spatial_merge_size"],
            activation=values["hidden_act"],
            theta=float(rope.get("rope_theta") or 10000.0),
            is_gated=True,
            eps=float(values["rms_norm_eps"]),
            qkv_bias=bool(values["attention_bias"]),
            bias=False,
        )
        return cls(tower, values["intermediate_size"], values["image_size"] // values["patch_size"])


def with_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with what its text_config leaves unsaid."""
    text = dict(config.get("text_config") or {})
    heads = size_of(text, "num_attention_heads")
    base, scaling = rope_parameters(text)
    values = {
        "head_dim": size_of(text, "hidden_size") // heads,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        **{name: value for name, value in text.items() if value is not None},
        "rope_parameters": {"mrope_section": SECTIONS, **scaling, "rope_theta": base},
    }
    return {**config, "text_config": values}
