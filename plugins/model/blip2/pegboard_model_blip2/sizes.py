"""What the model and the processor read in a config. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.config_numbers import numbers
from pegboard_models.vision_sizes import VisionSizes

IMAGE_TOKEN = 50265
"""The token of configs that name none: `<image>` of the published checkpoints."""
KIND = "blip_2_vision_model"
ENCODER_DECODERS = ("t5", "mt5", "umt5", "bart", "mbart", "pegasus")


def sizes_of(config: Mapping[str, Any]) -> VisionSizes:
    """Return the sizes of the tower. Raises ModelError."""
    return VisionSizes.of({"model_type": KIND, **(config.get("vision_config") or {})}, (KIND,))


def queries_of(config: Mapping[str, Any]) -> int:
    """Return how many rows an image has. Raises ModelError."""
    return numbers(config, {"num_query_tokens": 32}, "config")["num_query_tokens"]


def check_language(config: Mapping[str, Any]) -> None:
    """Raise ModelError for language models with an encoder."""
    kind = (config.get("text_config") or {}).get("model_type")
    if kind in ENCODER_DECODERS or (config.get("text_config") or {}).get("is_encoder_decoder"):
        raise ModelError(
            f"the language model of this BLIP-2 is {kind!r}, whose prompts go to an encoder; only "
            "decoders such as OPT can be served. Use a checkpoint such as Salesforce/blip2-opt-2.7b"
        )
