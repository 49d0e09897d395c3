"""What the model and the processor of GLM-4V-9B read in a config. This module does not import
torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.config_numbers import numbers
from pegboard_models.vision_sizes import VisionSizes

MERGED = 2
"""Patches of a row's side."""
POSITION = "position"
"""The name of the axis of positions."""
TOWER = {
    "image_size": 1120,
    "patch_size": 14,
    "hidden_size": 1792,
    "num_heads": 16,
    "num_hidden_layers": 63,
    "intermediate_size": 15360,
}
FACTORS = {"layer_norm_eps": 1e-6, "scaling_factor": 8}
TOKENS = {"boi_token_id": 151339, "pad_token_id": 151329, "eoi_token_id": 151340}


@dataclass(frozen=True)
class EvaSizes:
    """factor: rows are divided by it."""

    vision: VisionSizes
    factor: float

    @property
    def num_rows(self) -> int:
        """The rows of an image: those of its patches, one before them and one after them."""
        return (self.vision.grid // MERGED) ** 2 + 2

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EvaSizes:
        """Read the vision_config. Raises ModelError."""
        given = config.get("vision_config") or {}
        if not isinstance(given, Mapping):
            raise ModelError(
                f"the checkpoint's config has vision_config={given!r}; expected an object"
            )
        values = numbers(given, TOWER, "vision_config")
        factors = {name: factor_of(given, name) for name in FACTORS}
        vision = VisionSizes(
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=values["num_heads"],
            image_size=values["image_size"],
            patch_size=values["patch_size"],
            activation=str(given.get("hidden_act", "gelu")),
            eps=factors["layer_norm_eps"],
            is_clip=True,
        )
        if vision.image_size % (MERGED * vision.patch_size):
            raise ModelError(
                f"the checkpoint's vision_config has image_size={vision.image_size}; expected a "
                f"multiple of {MERGED} patches of {vision.patch_size} pixels"
            )
        if vision.hidden_size % vision.num_heads:
            raise ModelError(
                f"the checkpoint's vision_config has num_heads={vision.num_heads}; expected a "
                f"divisor of hidden_size={vision.hidden_size}"
            )
        for name, expected in (("in_channels", 3), ("num_positions", vision.num_positions)):
            if given.get(name, expected) != expected:
                raise ModelError(
                    f"the checkpoint's vision_config has {name}={given[name]!r}; expected "
                    f"{expected}"
                )
        return cls(vision, factors["scaling_factor"])


def factor_of(given: Mapping[str, Any], name: str) -> float:
    """Return a positive number of a vision_config. Raises ModelError."""
    value = given.get(name, FACTORS[name])
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ModelError(
            f"the checkpoint's vision_config has {name}={value!r}; expected a positive number"
        )
    return float(value)


def tokens_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the tokens of the beginning of an image, of its patches and of its end. Raises
    ModelError."""
    begin, patch, end = (config.get(name, default) for name, default in TOKENS.items())
    for name, value in zip(TOKENS, (begin, patch, end), strict=True):
        if type(value) is not int or value < 0:
            raise ModelError(
                f"the checkpoint's config has {name}={value!r}; expected the id of a token"
            )
    return begin, patch, end
