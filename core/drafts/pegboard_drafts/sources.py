"""Checks of the checkpoints that draft models are built from. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.weight_loader import Checkpoint

SIZES = {"hidden_size": "reads hidden states of size", "vocab_size": "has a vocabulary of size"}


def named_by_user(draft: Checkpoint | None, method: str) -> Checkpoint:
    """Return the checkpoint that the user has named. Raises ConfigError if there is none."""
    if draft is None:
        raise ConfigError(
            f"the method {method} needs a head: set spec_model, or model in speculative_config"
        )
    return draft


def language_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model."""
    language = config.get("text_config")
    return language if isinstance(language, Mapping) else config


def positive(draft: Checkpoint, what: str, name: str, value: Any) -> int:
    """Return a value of the draft model's config, which must be a whole number above 0. what: the
    model, in words. Raises ModelError."""
    if type(value) is not int or value < 1:
        raise ModelError(
            f"{draft.path}: its config has {name}={value!r}, and {what} needs a whole number above "
            "0; name a checkpoint that was made for this method"
        )
    return value


def target_sizes(
    target: Checkpoint, draft: Checkpoint, sizes: Mapping[str, Any]
) -> tuple[int, int]:
    """Return hidden_size and vocab_size of the target. sizes: the same of the draft model; None =
    its config does not have them. Raises ModelError if they differ."""
    language = language_of(target.config)
    for name, words in SIZES.items():
        size = sizes[name]
        if size is not None and size != language.get(name):
            raise ModelError(
                f"{draft.path}: this head {words} {size!r}, and {target.path} has "
                f"{language.get(name)}; a head fits only the model that it was trained for"
            )
    return language["hidden_size"], language["vocab_size"]
