"""Reads values of a checkpoint's config for a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, get_origin

from pegboard.errors import ModelError

# model plugins import these from here
from pegboard.plan.model_config import rope_parameters as rope_parameters
from pegboard.plan.model_config import stretched as stretched

_TYPES: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
}

T = TypeVar("T", int, float, bool, str, list[str])


def read(config: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """Return a value of the config, or None if it has none. Raises ModelError if the value has
    another type."""
    value = config.get(name)
    expected: Any = (int, float) if kind is float else get_origin(kind) or kind
    if value is not None and (
        not isinstance(value, expected) or isinstance(value, bool) != (kind is bool)
    ):
        expected = _TYPES[get_origin(kind) or kind]
        raise ModelError(f"the checkpoint's config has {name}={value!r}; expected {expected}")
    return value


def size_of(config: Mapping[str, Any], name: str) -> int:
    """Return a size. Raises ModelError if the config does not have it."""
    size = read(config, name, int)
    if size is None:
        raise ModelError(f"the checkpoint's config has {name}=None; expected a whole number")
    return size
