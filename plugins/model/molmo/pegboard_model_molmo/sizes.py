"""What the model and the processor read in a config. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.config_numbers import numbers
from pegboard_models.vision_sizes import VisionSizes

NEW_TOKENS = 128
"""Rows of the second table of embeddings. The output head has none of these tokens."""
POOL = 2
"""Patches of a row's side."""
TOWER = {
    "image_patch_size": 14,
    "image_emb_dim": 1024,
    "image_num_heads": 16,
    "image_num_layers": 23,
    "image_mlp_dim": 4096,
}
SIDES = [336, 336]
LAYERS = [-2, -9]
FORM: Mapping[str, Any] = {
    "layer_norm_type": "rms",
    "weight_tying": False,
    "tie_word_embeddings": False,
}
"""The only values that are supported. Published checkpoints have no others."""
TOWER_FORM: Mapping[str, Any] = {
    "image_mlp_activations": "quick_gelu",
    "image_norm_eps": 1e-5,
    "image_model_type": "openai",
}


@dataclass(frozen=True)
class TowerSizes:
    """layers: of the tower, those whose states are the features of a patch, from 0 on."""

    vision: VisionSizes
    layers: tuple[int, ...]

    @property
    def width(self) -> int:
        """The channels of a patch's features."""
        return len(self.layers) * self.vision.hidden_size

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TowerSizes:
        """Read vision_backbone and vit_layers. The published configs have neither. Raises
        ModelError."""
        given = config.get("vision_backbone") or {}
        if not isinstance(given, Mapping):
            raise ModelError(
                f"the checkpoint's config has vision_backbone={given!r}; expected an object"
            )
        refuse_others("vision_backbone", given, TOWER_FORM)
        values = numbers(given, TOWER, "vision_backbone")
        patch = values["image_patch_size"]
        size = side_of(given.get("image_default_input_size", SIDES), "vision_backbone")
        if values["image_emb_dim"] % values["image_num_heads"]:
            raise ModelError(
                f"the checkpoint's vision_backbone has image_num_heads={values['image_num_heads']};"
                f" expected a divisor of image_emb_dim={values['image_emb_dim']}"
            )
        vision = VisionSizes(
            hidden_size=values["image_emb_dim"],
            intermediate_size=values["image_mlp_dim"],
            num_layers=values["image_num_layers"],
            num_heads=values["image_num_heads"],
            image_size=size,
            patch_size=patch,
            activation="quick_gelu",
            eps=TOWER_FORM["image_norm_eps"],
            is_clip=True,
        )
        if size % (POOL * patch):
            raise ModelError(
                f"the checkpoint's vision_backbone has crops of {size} pixels a side; expected a "
                f"multiple of {POOL} patches of {patch} pixels"
            )
        check_positions(given, vision)
        return cls(vision, layers_of(config, vision.num_layers))


def check_positions(given: Mapping[str, Any], vision: VisionSizes) -> None:
    """Raise ModelError if the table of positions is not that of a crop and of the class token."""
    expected = {
        "image_num_pos": vision.num_positions,
        "image_pos_patch_size": vision.patch_size,
        "image_num_key_value_heads": vision.num_heads,
        "image_head_dim": vision.hidden_size // vision.num_heads,
    }
    refuse_others("vision_backbone", given, expected)


def refuse_others(place: str, given: Mapping[str, Any], form: Mapping[str, Any]) -> None:
    """Raise ModelError for values other than those of the form. place: where the checkpoint has
    them."""
    for name, expected in form.items():
        if given.get(name) not in (None, expected):
            raise ModelError(
                f"the checkpoint's {place} has {name}={given[name]!r}; only {expected!r} is "
                "supported"
            )


def side_of(value: object, place: str) -> int:
    """Return the pixels of a crop's side. value: [height, width], or one number for both. Raises
    ModelError."""
    sides: Any = [value, value] if type(value) is int else value
    is_list = isinstance(sides, list | tuple)
    if not is_list or len(sides) != 2 or any(type(s) is not int or s < 1 for s in sides):
        raise ModelError(
            f"the checkpoint's {place} has crops of {value!r} pixels; expected two whole numbers, "
            "such as [336, 336]"
        )
    if sides[0] != sides[1]:
        raise ModelError(
            f"the checkpoint's {place} has crops of {sides[0]} × {sides[1]} pixels; expected the "
            "same height and width"
        )
    return int(sides[0])


def layers_of(config: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the layers of vit_layers, from 0 on. count: the layers of the tower. Raises
    ModelError."""
    asked = config.get("vit_layers", LAYERS)
    is_list = isinstance(asked, list | tuple) and len(asked) > 0
    if not is_list or any(type(x) is not int or not -count <= x < count for x in asked):
        raise ModelError(
            f"the checkpoint's config has vit_layers={asked!r}; expected numbers of layers, from "
            f"{-count} to {count - 1}"
        )
    return tuple(layer % count for layer in asked)
