"""What the model and the processor read in a config. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.vision_sizes import Selection, VisionSizes

IMAGE_TOKEN = 151667
KIND = "internvl_vision"
PUBLISHED_KIND = "intern_vit_6b"
TOWER: Mapping[str, Any] = {
    "hidden_size": 3200,
    "intermediate_size": 12800,
    "num_hidden_layers": 48,
    "num_attention_heads": 25,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
    "norm_type": "rms_norm",
    "layer_norm_eps": 1e-6,
    "qkv_bias": False,
    "qk_normalization": True,
    "num_channels": 3,
}
"""The values that a published vision_config has if it does not say, those of InternViT-6B."""
CHAT: Mapping[str, Any] = {
    "downsample_ratio": 0.5,
    "ps_version": "v1",
    "select_layer": -1,
    "dynamic_image_size": False,
    "use_thumbnail": False,
    "pad2square": False,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 6,
}
"""The values that a published config has if it does not say."""


def sizes_of(config: Mapping[str, Any]) -> VisionSizes:
    """Return the sizes of the tower. Raises ModelError if images or patches are not square."""
    vision = dict(config.get("vision_config") or {})
    for name in ("image_size", "patch_size"):
        sides = vision.get(name)
        if isinstance(sides, list | tuple):
            if len({*sides}) != 1:
                raise ModelError(
                    f"the checkpoint's vision_config has {name}={sides!r}; expected equal sides"
                )
            vision[name] = sides[0]
    return VisionSizes.of(vision, (KIND,))


def selection_of(config: Mapping[str, Any], sizes: VisionSizes) -> Selection:
    """Return the state of the tower that is used. Raises ModelError if it is not one state of all
    patches."""
    selection = Selection.of({"vision_feature_layer": -1, **config}, sizes)
    if len(selection.depths) > 1 or not selection.drops_first:
        raise ModelError(
            f"the checkpoint's config has vision_feature_layer={config.get('vision_feature_layer')}"
            f" and vision_feature_select_strategy={config.get('vision_feature_select_strategy')!r};"
            " InternVL takes one layer, and 'default'"
        )
    return selection


def scale_of(config: Mapping[str, Any]) -> int:
    """Return how many patches of a line, and how many lines, are one row. Raises ModelError."""
    ratio = config.get("downsample_ratio", 0.5)
    if type(ratio) not in (int, float) or not 0 < ratio <= 1 or 1 / ratio != int(1 / ratio):
        raise ModelError(
            f"the checkpoint's config has downsample_ratio={ratio!r}; expected 1, 0.5, 0.25 …"
        )
    return int(1 / ratio)


def standard(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a published config in transformers' form. Raises ModelError for values that are wrong
    or not supported."""
    vision = config.get("vision_config")
    kind = vision.get("model_type") if isinstance(vision, Mapping) else None
    if not isinstance(vision, Mapping) or kind not in (None, PUBLISHED_KIND):
        raise ModelError(
            f"the checkpoint's vision tower is {kind!r}; supported: {PUBLISHED_KIND}. Checkpoints "
            "in transformers' form name the architecture InternVLForConditionalGeneration"
        )
    tower = {**TOWER, **vision}
    if tower["num_channels"] != 3:
        raise ModelError(
            f"the checkpoint's vision_config has num_channels={tower['num_channels']!r}; expected 3"
        )
    for name in ("qkv_bias", "qk_normalization"):
        check_switch("vision_config", name, tower[name])
    given = {**CHAT, **config}
    if given["ps_version"] != "v2":
        raise ModelError(
            f"the checkpoint's config has ps_version={given['ps_version']!r}; expected 'v2'. "
            "Patches of the first version are in another order; use a newer checkpoint"
        )
    if given["pad2square"] is not False:
        raise ModelError(
            f"the checkpoint's config has pad2square={given['pad2square']!r}; expected false. "
            "Images are stretched to tiles and not padded; use another checkpoint"
        )
    forced = given.get("force_image_size")
    if forced not in (None, tower["image_size"]):
        raise ModelError(
            f"the checkpoint's config has force_image_size={forced!r}, and its vision_config has "
            f"image_size={tower['image_size']!r}; expected the same, because learned positions are "
            "not stretched"
        )
    return {
        **config,
        "downsample_ratio": given["downsample_ratio"],
        "vision_feature_layer": given["select_layer"],
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "vision_config": {
            **tower,
            "model_type": KIND,
            "attention_bias": tower["qkv_bias"],
            "use_qk_norm": tower["qk_normalization"],
            "use_mean_pooling": True,
            "use_absolute_position_embeddings": True,
        },
    }


def check_switch(place: str, name: str, value: object) -> None:
    """Raise ModelError if a value is neither true nor false. place: where the checkpoint has it."""
    if type(value) is not bool:
        raise ModelError(f"the checkpoint's {place} has {name}={value!r}; expected true or false")
