"""What the model and the processor read in a config. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.config_numbers import numbers
from pegboard_models.patch_sizes import check_heads, wrong

IMAGE_TOKEN = 163605
DEFAULTS = {
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
}
"""A vision_config without these values, as in the published MoonViTConfig."""
KIND = "moonvit"
LANGUAGE = "deepseek_v3"


@dataclass(frozen=True)
class MoonViTSizes:
    """width: of the vectors of patches. inner: of the feed-forward blocks. patch: pixels of a
    patch's side. merge: patches of a row's side. grid: (height, width) of the table of positions,
    in patches."""

    depth: int
    num_heads: int
    width: int
    inner: int
    patch: int
    merge: int
    grid: tuple[int, int]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> MoonViTSizes:
        """Read the vision_config. Raises ModelError."""
        vision = config.get("vision_config") or {}
        kind = vision.get("model_type", KIND) if isinstance(vision, Mapping) else vision
        if kind != KIND:
            raise wrong("model_type", kind, repr(KIND))
        values = numbers(vision, DEFAULTS, "vision_config")
        sizes = cls(
            depth=values["num_hidden_layers"],
            num_heads=values["num_attention_heads"],
            width=values["hidden_size"],
            inner=values["intermediate_size"],
            patch=values["patch_size"],
            merge=merge_of(vision, "vision_config"),
            grid=(values["init_pos_emb_height"], values["init_pos_emb_width"]),
        )
        check_heads(sizes.num_heads, sizes.width)
        return sizes


def with_language(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config whose text_config has a model_type. The published one is DeepSeek-V3."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    return {**config, "text_config": {"model_type": LANGUAGE, **text}}


def merge_of(values: Mapping[str, Any], what: str) -> int:
    """Return how many patches a row's side has. what: the values' name, for errors. Raises
    ModelError."""
    kernel = values.get("merge_kernel_size", [2, 2])
    sides = list(kernel) if isinstance(kernel, list | tuple) else []
    if len(sides) != 2 or sides[0] != sides[1] or type(sides[0]) is not int or sides[0] < 1:
        raise ModelError(
            f"the checkpoint's {what} has merge_kernel_size={kernel!r}; expected two equal whole "
            "numbers from 1 on, such as [2, 2]. Correct it"
        )
    return sides[0]


def image_token(config: Mapping[str, Any]) -> int:
    """Return the id of the token in whose place a row is. Raises ModelError."""
    token = config.get("media_placeholder_token_id", IMAGE_TOKEN)
    if type(token) is not int or token < 0:
        raise ModelError(
            f"the checkpoint's config has media_placeholder_token_id={token!r}; expected the id of "
            "a token"
        )
    return token
