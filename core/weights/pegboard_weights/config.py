"""Reads the values of a checkpoint's quantization config. Errors name the value, what was expected and the method."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pegboard.errors import ModelError


class QuantConfig:
    """The values of a config ({"quant_method": …, "bits": 4, …})."""

    def __init__(self, values: Mapping[str, Any], method: str) -> None:
        self.values, self.method = values, method

    def one_of(self, names: str | tuple[str, ...], allowed: Collection[Any], default: Any = None) -> Any:
        """Return the value under the first of `names` that is there. Raises ModelError if it is not allowed."""
        names = (names,) if isinstance(names, str) else names
        name = next((name for name in names if self.values.get(name) is not None), names[0])
        value = self.values.get(name, default)
        value = default if value is None else value
        if not any(value == each and type(value) is type(each) for each in allowed):
            raise self._error(name, value, "supports " + ", ".join(repr(each) for each in allowed))
        return value

    def size(self, names: str | tuple[str, ...], default: int | None = None) -> int:
        """Return a number of columns: positive, or −1 for all columns of the weight."""
        names = (names,) if isinstance(names, str) else names
        name = next((name for name in names if self.values.get(name) is not None), names[0])
        value = self.values.get(name, default)
        if type(value) is not int or not (value == -1 or value > 0):
            raise self._error(name, value, "needs a positive number or -1")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name, default)
        if type(value) is not bool:
            raise self._error(name, value, "needs true or false")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of texts, () if there is none."""
        value = self.values.get(name) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise self._error(name, value, "needs a list of texts")
        return tuple(value)

    def _error(self, name: str, value: object, needs: str) -> ModelError:
        return ModelError(f"the checkpoint's quantization_config has {name}={value!r}; {self.method} {needs}")


def matches(module: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns means the module: a whole path, the last or any inner names of a path
    ("self_attn.q_proj", "lm_head"), or "re:" and a regular expression for the beginning of the path."""
    dotted = f".{module}."
    for pattern in patterns:
        if pattern.startswith("re:"):
            if _regex(pattern[3:]).match(module):
                return True
        elif f".{pattern.strip('.')}." in dotted:
            return True
    return False


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ModelError(f"the checkpoint's quantization_config has the pattern {text!r}: {error}") from error
