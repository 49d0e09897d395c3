"""What the model and the processor read in a config. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.vision_sizes import VisionSizes

IMAGE_TOKEN = 200092
KIND = "llama4_vision_model"
WIDTHS = {"projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 7680}


@dataclass(frozen=True)
class Llama4Sizes:
    """merged: patches of a row's side. inner, outer: widths of the adapter."""

    tower: VisionSizes
    merged: int
    inner: int
    outer: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Llama4Sizes:
        """Read the vision_config. Raises ModelError for wrong values."""
        given = config.get("vision_config") or {}
        tower = VisionSizes.of({**given, "model_type": KIND}, (KIND,))
        ratio = given.get("pixel_shuffle_ratio", 0.5)
        if type(ratio) not in (int, float) or not 0 < ratio <= 1 or (1 / ratio) % 1:
            raise wrong("pixel_shuffle_ratio", ratio, "1 divided by a whole number")
        merged = int(1 / ratio)
        widths = {name: given.get(name, default) for name, default in WIDTHS.items()}
        for name, value in widths.items():
            if type(value) is not int or value < 1:
                raise wrong(name, value, "a whole number from 1 on")
        inner, outer, last = widths.values()
        if tower.hidden_size * merged**2 != tower.intermediate_size:
            raise wrong(
                "intermediate_size",
                tower.intermediate_size,
                f"{tower.hidden_size * merged**2}, the width of {merged**2} patches",
            )
        if not inner == outer == last:
            raise wrong("projector_input_dim", inner, f"{outer}, as its other widths")
        if tower.hidden_size // tower.num_heads % 4:
            raise wrong("num_attention_heads", tower.num_heads, "heads of a multiple of 4 channels")
        tower.merged(merged)
        return cls(tower, merged, inner, outer)

    @property
    def num_rows(self) -> int:
        """The rows of a tile."""
        return self.tower.merged(self.merged)


def wrong(name: str, value: object, expected: str) -> ModelError:
    """Return the error of a value of the vision_config."""
    return ModelError(f"the checkpoint's vision_config has {name}={value!r}; expected {expected}")
