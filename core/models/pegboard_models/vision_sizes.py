"""The sizes of a vision tower, from a checkpoint's config. This module does not import torch,
because processors read it, too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    "siglip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    "blip_2_vision_model": {
        "hidden_size": 1408,
        "intermediate_size": 6144,
        "num_hidden_layers": 39,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
    },
    "llama4_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 5632,
        "num_hidden_layers": 34,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "hidden_act": "gelu",
    },
    "pixtral": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 1024,
        "patch_size": 16,
        "hidden_act": "gelu",
    },
    "idefics3_vision": {
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    "internvl_vision": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
    },
}
"""The values that a tower has if its config has none, as in transformers."""


SQUARE = ("clip_vision_model", "siglip_vision_model")
"""Towers whose images all have the same size."""


@dataclass(frozen=True)
class VisionSizes:
    """What the config of a tower says. image_size, patch_size: pixels of a side. is_clip: it has a
    class token and a norm before the layers, and no bias of patches."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    activation: str
    eps: float
    is_clip: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], kinds: Collection[str] = SQUARE) -> VisionSizes:
        """Read a vision_config. Raises ModelError for towers of other kinds."""
        kind = config.get("model_type")
        if not isinstance(kind, str) or kind not in kinds:
            raise ModelError(
                f"the checkpoint's vision tower is {kind!r}; supported: {', '.join(kinds)}"
            )
        values = {**DEFAULTS[kind], **config}
        for name, default in DEFAULTS[kind].items():
            value = values[name]
            if type(value) is not type(default) or (type(value) is int and value < 1):
                expected = f"a {type(default).__name__} such as {default!r}"
                raise ModelError(
                    f"the checkpoint's vision_config has {name}={value!r}; expected {expected}"
                )
        sizes = cls(
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=values["num_attention_heads"],
            image_size=values["image_size"],
            patch_size=values["patch_size"],
            activation=values["hidden_act"],
            eps=values.get("layer_norm_eps", 1e-5),
            is_clip=kind == "clip_vision_model",
        )
        if sizes.hidden_size % sizes.num_heads:
            raise ModelError(
                f"the checkpoint's vision_config has hidden_size={sizes.hidden_size}, which is not "
                f"a multiple of num_attention_heads={sizes.num_heads}"
            )
        return sizes

    @property
    def grid(self) -> int:
        """The patches of a side."""
        return self.image_size // self.patch_size

    def merged(self, count: int) -> int:
        """Return the blocks of count · count patches of an image. Raises ModelError if they do not
        fill it."""
        if count < 1 or self.grid % count:
            raise ModelError(
                f"the checkpoint's vision tower has {self.grid} patches a side, which cannot be "
                f"merged by {count}; correct its config"
            )
        return (self.grid // count) ** 2

    @property
    def num_positions(self) -> int:
        """The patches of an image, and the class token."""
        return self.grid**2 + self.is_clip


@dataclass(frozen=True)
class Selection:
    """Which states of a tower are features. depths: 0 = before the first layer, i = after layer i;
    the states of several are one vector. drops_first: "default" leaves out the first position."""

    depths: tuple[int, ...]
    drops_first: bool

    @classmethod
    def of(
        cls, config: Mapping[str, Any], sizes: VisionSizes, strategy: str = "default"
    ) -> Selection:
        """Read `vision_feature_layer` (negative: from the last one) and
        `vision_feature_select_strategy` of a config. strategy: if it names none. Raises ModelError
        for other values."""
        count = sizes.num_layers + 1
        asked = config.get("vision_feature_layer", -2)
        chosen = asked if isinstance(asked, list | tuple) else [asked]
        if not chosen or not all(
            type(layer) is int and -count <= layer < count for layer in chosen
        ):
            raise ModelError(
                f"the checkpoint's config has vision_feature_layer={asked!r}; expected a number "
                f"from {-count} to {count - 1}, or a list of them"
            )
        strategy = config.get("vision_feature_select_strategy", strategy)
        if strategy not in ("default", "full"):
            raise ModelError(
                f"the checkpoint's config has vision_feature_select_strategy={strategy!r}; expected"
                " 'default' or 'full'"
            )
        return cls(tuple(layer % count for layer in chosen), strategy == "default")


def merge_size(config: Mapping[str, Any], default: int) -> int:
    """Return how many patches of a line, and how many lines, are one row. Raises ModelError."""
    size = config.get("spatial_merge_size", default)
    if type(size) is not int or size < 1:
        raise ModelError(
            f"the checkpoint's config has spatial_merge_size={size!r}; expected a positive number"
        )
    return size
