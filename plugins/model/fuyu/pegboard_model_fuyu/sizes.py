"""What the model and the processor read in a config. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.config_numbers import numbers

IMAGE_TOKEN = 71011
DEFAULTS = {"patch_size": 30, "num_channels": 3}
TEXT = {
    "model_type": "persimmon",
    "vocab_size": 262144,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "hidden_act": "relu2",
    "max_position_embeddings": 16384,
    "layer_norm_eps": 1e-5,
    "qk_layernorm": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
}
"""The values of the language model that a config without text_config lacks."""


def patch_of(config: Mapping[str, Any]) -> int:
    """Return the pixels of a patch's side. Raises ModelError."""
    values = numbers(config, DEFAULTS, "config")
    if values["num_channels"] != DEFAULTS["num_channels"]:
        raise ModelError(
            f"the checkpoint's config has num_channels={values['num_channels']}; images have 3"
        )
    return values["patch_size"]


def with_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose text_config has the values of the language model. The published one has
    them beside the others."""
    if config.get("text_config") is not None:
        return dict(config)
    named = {name: config[name] for name in TEXT if name in config}
    scaling = {name: config[name] for name in ("rope_scaling", "rope_parameters") if name in config}
    text = {**TEXT, **named, **scaling, "model_type": TEXT["model_type"]}
    return {**config, "text_config": text}
