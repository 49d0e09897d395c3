"""How a published config says that images are cut into tiles. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError, RequestError
from pegboard_model_internvl.sizes import CHAT

MEAN = [0.485, 0.456, 0.406]
DEVIATION = [0.229, 0.224, 0.225]
"""Of the colors of ImageNet."""
BICUBIC = 3
"""Pillow's number of the filter."""
SWITCHES = ("dynamic_image_size", "use_thumbnail")
LIMITS = ("min_dynamic_patch", "max_dynamic_patch")


@dataclass(frozen=True)
class Tiles:
    """dynamic_image_size: images are cut. min_dynamic_patch, max_dynamic_patch: how many tiles they
    are cut into. use_thumbnail: images of several tiles are also seen as a whole."""

    dynamic_image_size: bool
    use_thumbnail: bool
    min_dynamic_patch: int
    max_dynamic_patch: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Tiles:
        """Read a config. Raises ModelError."""
        values = {name: config.get(name, CHAT[name]) for name in (*SWITCHES, *LIMITS)}
        if wrong := wrong_value(values):
            raise ModelError(f"the checkpoint's config has {wrong}")
        return cls(**values)

    def changed(self, options: Mapping[str, Any]) -> Tiles:
        """Return these tiles with other values. Raises RequestError."""
        values = {name: getattr(self, name) for name in (*SWITCHES, *LIMITS)}
        if unknown := sorted(options.keys() - values.keys()):
            raise RequestError(
                f"mm_processor_kwargs has {', '.join(unknown)}; InternVL takes "
                f"{', '.join(sorted(values))}",
                parameter="mm_processor_kwargs",
            )
        changed = {**values, **options}
        if wrong := wrong_value(changed):
            raise RequestError(f"mm_processor_kwargs has {wrong}", parameter="mm_processor_kwargs")
        return Tiles(**changed)

    def options(self) -> dict[str, Any]:
        """Return the same as options of transformers' image processor."""
        return {
            "crop_to_patches": self.dynamic_image_size,
            "min_patches": self.min_dynamic_patch,
            "max_patches": self.max_dynamic_patch,
        }


def wrong_value(values: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the values of tiles, and what was expected; None = nothing."""
    for name in SWITCHES:
        if type(values[name]) is not bool:
            return f"{name}={values[name]!r}; expected true or false"
    least, most = (values[name] for name in LIMITS)
    if type(least) is not int or type(most) is not int or not 1 <= least <= most:
        return (
            f"min_dynamic_patch={least!r} and max_dynamic_patch={most!r}; expected whole numbers "
            "from 1 on, the first one not above the second one"
        )
    return None


def image_values(size: int) -> dict[str, Any]:
    """Return the values of transformers' image processor. size: of a tile's side, in pixels."""
    return {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": size, "width": size},
        "resample": BICUBIC,
        "image_mean": MEAN,
        "image_std": DEVIATION,
    }
