"""The objects and whole numbers of a checkpoint's config. This module does not import torch,
because processors read it, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import ModelError


def numbers(config: Mapping[str, Any], defaults: Mapping[str, int], what: str) -> dict[str, int]:
    """Return the whole numbers of a config. what: its name, for errors. Raises ModelError."""
    values = {name: config.get(name, default) for name, default in defaults.items()}
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise ModelError(
                f"the checkpoint's {what} has {name}={value!r}; expected a whole number from 1 on. "
                "Correct it"
            )
    return values


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object in a config; without it, an empty one. Raises ModelError."""
    given = config.get(name)
    if given is not None and not isinstance(given, Mapping):
        raise ModelError(f"the checkpoint's config has {name}={given!r}; expected an object")
    return given or {}
