"""What the model and the processor of DeepSeek-VL2 read in a config. This module does not import
torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.config_numbers import section
from pegboard_models.vision_sizes import VisionSizes

TOWER: Mapping[str, Any] = {
    "image_size": 384,
    "patch_size": 16,
    "width": 1024,
    "layers": 24,
    "heads": 16,
    "mlp_ratio": 4.0,
}
"""The values that a vision_config has if it does not say, as in the published code."""
TOWER_FORM: Mapping[str, Any] = {
    "class_token": False,
    "ignore_head": True,
    "global_pool": "map",
    "num_classes": 0,
}
"""The only values that are supported: features are those of all patches."""
PROJECTOR: Mapping[str, Any] = {
    "input_dim": 1152,
    "n_embed": 2048,
    "depth": 2,
    "mlp_ratio": 1,
    "downsample_ratio": 2,
}
DOWNSAMPLE = "downsample_mlp_gelu"
TYPES = (DOWNSAMPLE, "linear")
VIEWS = ("head", "tail")


@dataclass(frozen=True)
class ProjectorSizes:
    """input_dim, n_embed: channels of a patch, and of a row. widths: of the linear layers' results.
    ratio: the patches of a row's side."""

    input_dim: int
    n_embed: int
    widths: Sequence[int]
    ratio: int
    is_linear: bool


def numbers(
    place: str, given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, int | float]:
    """Return the values with the names of the defaults. place: where the checkpoint has them.
    Raises ModelError for values that are no positive numbers of the default's type."""
    values = {name: given.get(name, default) for name, default in defaults.items()}
    for name, default in defaults.items():
        kinds = (int, float) if type(default) is float else (int,)
        if type(values[name]) not in kinds or not 0 < values[name] < math.inf:
            expected = "a positive number" if type(default) is float else "a whole number from 1 on"
            raise ModelError(
                f"the checkpoint's {place} has {name}={values[name]!r}; expected {expected}"
            )
    return values


def check_form(place: str, given: Mapping[str, Any], form: Mapping[str, Any]) -> None:
    """Raise ModelError for values other than those of the form, the only ones that are supported.
    place: where the checkpoint has them."""
    for name, expected in form.items():
        value = given.get(name, expected)
        if value != expected or type(value) is not type(expected):
            raise ModelError(
                f"the checkpoint's {place} has {name}={value!r}; only {expected!r} is supported"
            )


def tower_of(config: Mapping[str, Any]) -> VisionSizes:
    """Return the sizes of the tower. Raises ModelError."""
    vision = section(config, "vision_config")
    check_form("vision_config", vision, TOWER_FORM)
    values = numbers("vision_config", vision, TOWER)
    sizes = {
        "hidden_size": values["width"],
        "intermediate_size": int(values["width"] * values["mlp_ratio"]),
        "num_hidden_layers": values["layers"],
        "num_attention_heads": values["heads"],
        "image_size": values["image_size"],
        "patch_size": values["patch_size"],
    }
    tower = VisionSizes.of({**sizes, "model_type": "siglip_vision_model"})
    check_grid("vision_config", tower)
    return tower


def check_grid(place: str, tower: VisionSizes) -> None:
    """Raise ModelError if an image has no patches. place: where the checkpoint has the sizes."""
    if tower.grid < 1:
        raise ModelError(
            f"the checkpoint's {place} has image_size={tower.image_size}; expected at least a patch"
            f" of {tower.patch_size} pixels"
        )


def projector_of(config: Mapping[str, Any], width: int) -> ProjectorSizes:
    """Return the sizes of the projector. width: of the tower's features. Raises ModelError."""
    given = section(config, "projector_config")
    kind = given.get("projector_type", DOWNSAMPLE)
    if kind not in TYPES:
        raise ModelError(
            f"the checkpoint's projector_config has projector_type={kind!r}; expected "
            f"{' or '.join(TYPES)}"
        )
    check_form("projector_config", given, {"token_pooling": False})
    values = numbers("projector_config", given, PROJECTOR)
    if values["input_dim"] != width:
        raise ModelError(
            f"the checkpoint's projector_config has input_dim={values['input_dim']}; the features "
            f"of its vision tower have {width} channels"
        )
    is_linear = kind == "linear"
    inner = values["n_embed"] * values["mlp_ratio"]
    inside = [] if is_linear else [inner] * max(1, int(values["depth"]) - 1)
    return ProjectorSizes(
        input_dim=width,
        n_embed=int(values["n_embed"]),
        widths=[*map(int, inside), int(values["n_embed"])],
        ratio=1 if is_linear else int(values["downsample_ratio"]),
        is_linear=is_linear,
    )


def check_width(projector: ProjectorSizes, hidden_size: int) -> None:
    """Raise ModelError if rows do not have the channels of the language model."""
    if projector.n_embed != hidden_size:
        raise ModelError(
            f"the checkpoint's projector_config has n_embed={projector.n_embed}; its language "
            f"model has hidden_size={hidden_size}"
        )


def side_of(tower: VisionSizes, projector: ProjectorSizes) -> int:
    """Return the rows of a view's side."""
    return -(-tower.grid // projector.ratio)


def is_head(config: Mapping[str, Any]) -> bool:
    """Return whether the rows of the whole image come before those of its tiles. Raises
    ModelError for other orders of rows."""
    check_form("config", config, {"tile_tag": "2D"})
    place = config.get("global_view_pos", VIEWS[0])
    if place not in VIEWS:
        raise ModelError(
            f"the checkpoint's config has global_view_pos={place!r}; expected {' or '.join(VIEWS)}"
        )
    return bool(place == VIEWS[0])
