"""What the model and the processor read in a config. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.vision_sizes import VisionSizes

KIND = "clip_vision_model"
PROJECTION = 512
"""The numbers of a vector, if the config does not say."""
TEXT: Mapping[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
"""The values that a text_config has if it does not say, as in transformers."""
SIGLIP_KIND = "siglip_vision_model"
SIGLIP_TEXT: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""The same of SigLIP."""
SIGLIP_PADDING = 1
"""The token that texts are padded with, if no file says."""


@dataclass(frozen=True)
class TextSizes:
    """The sizes of the layers that read texts."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    hidden_act: str
    layer_norm_eps: float

    @classmethod
    def of(cls, config: Mapping[str, Any], defaults: Mapping[str, Any] = TEXT) -> TextSizes:
        """Read the text_config of a config. defaults: of what it does not say. Raises ModelError
        for values of other types."""
        given = {**defaults, **(config.get("text_config") or {})}
        for name, default in defaults.items():
            value = given[name]
            if type(value) is not type(default) or (type(value) is int and value < 1):
                raise ModelError(
                    f"the checkpoint's text_config has {name}={value!r}; expected a "
                    f"{type(default).__name__} such as {default!r}"
                )
        sizes = cls(**{name: given[name] for name in defaults})
        if sizes.hidden_size % sizes.num_attention_heads:
            raise ModelError(
                f"the checkpoint's text_config has hidden_size={sizes.hidden_size}, which is not a "
                f"multiple of num_attention_heads={sizes.num_attention_heads}"
            )
        return sizes


def vision_sizes(config: Mapping[str, Any], kind: str = KIND) -> VisionSizes:
    """Return the sizes of the tower. kind: its type. Raises ModelError for another one."""
    vision = {"model_type": kind, **(config.get("vision_config") or {})}
    return VisionSizes.of(vision, (kind,))


def projection_of(config: Mapping[str, Any]) -> int:
    """Return how many numbers a vector has. Raises ModelError."""
    size = config.get("projection_dim", PROJECTION)
    if type(size) is not int or size < 1:
        raise ModelError(
            f"the checkpoint's config has projection_dim={size!r}; expected a positive whole number"
        )
    return size


def check_siglip(config: Mapping[str, Any]) -> None:
    """Raise ModelError if SigLIP's vectors of texts and images cannot be compared."""
    text = TextSizes.of(config, SIGLIP_TEXT)
    vision = config.get("vision_config") or {}
    head = vision.get("vision_use_head", True)
    if head is not True:
        raise ModelError(
            f"the checkpoint's vision_config has vision_use_head={head!r}; expected true, because "
            "the head makes the vector of an image"
        )
    projected = (config.get("text_config") or {}).get("projection_size")
    width = text.hidden_size if projected is None else projected
    size = vision_sizes(config, SIGLIP_KIND).hidden_size
    if width != size:
        raise ModelError(
            f"the checkpoint's vectors of texts have {width!r} numbers and those of images {size}; "
            "expected the same. Correct projection_size of the text_config"
        )
