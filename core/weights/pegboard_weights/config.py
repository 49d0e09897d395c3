"""Reads the values of a checkpoint's quantization config. Errors name the value, what was expected
and the method."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from pegboard.errors import ModelError
from pegboard.log import get_logger

log = get_logger(__name__)

MAX_SIZE = 1 << 20
"""The most rows or columns that may share a scale. No matrix of a model is larger. A damaged config
could have any number."""


class QuantConfig:
    """The values of a config ({"quant_method": …, "bits": 4, …}). place: where they are in it
    ("config_groups.group_0.")."""

    def __init__(self, values: Mapping[str, Any], method: str, place: str = "") -> None:
        self.values = values
        self.method = method
        self.place = place

    def part(self, name: str) -> QuantConfig | None:
        """Return the object under a name, or None if there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, value, "needs an object")
        return QuantConfig(value, self.method, f"{self.place}{name}.")

    def one_of(
        self, names: str | tuple[str, ...], allowed: Collection[Any], default: Any = None
    ) -> Any:
        """Return the value under the first of `names` that is there. Raises ModelError if it is not
        allowed."""
        names = (names,) if isinstance(names, str) else names
        name = next((name for name in names if self.values.get(name) is not None), names[0])
        value = self.values.get(name, default)
        value = default if value is None else value
        if not any(value == each and type(value) is type(each) for each in allowed):
            raise self.error(name, value, "supports " + ", ".join(repr(each) for each in allowed))
        return value

    def size(self, names: str | tuple[str, ...], default: int | None = None) -> int:
        """Return a number of columns: from 1 to `MAX_SIZE`, or −1 for all columns of the weight."""
        names = (names,) if isinstance(names, str) else names
        name = next((name for name in names if self.values.get(name) is not None), names[0])
        value = self.values.get(name, default)
        if type(value) is not int or not (value == -1 or 0 < value <= MAX_SIZE):
            raise self.error(name, value, f"needs a positive number or -1, and at most {MAX_SIZE}")
        return value

    def block(self, name: str) -> tuple[int, int] | None:
        """Return how many rows and columns share a scale, each from 1 to `MAX_SIZE`, or None if the
        config does not say it. They are stored as [128, 128] or "128x128"."""
        value = self.values.get(name)
        if value is None:
            return None
        match = (
            re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", value) if isinstance(value, str) else None
        )
        sizes = value if match is None else [int(size) for size in match.groups()]
        is_pair = isinstance(sizes, list | tuple) and len(sizes) == 2
        if not is_pair or not all(type(size) is int and 0 < size <= MAX_SIZE for size in sizes):
            raise self.error(name, value, f"needs two positive numbers of at most {MAX_SIZE}")
        return sizes[0], sizes[1]

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name, default)
        if type(value) is not bool:
            raise self.error(name, value, "needs true or false")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of texts, () if there is none."""
        value = self.values.get(name) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise self.error(name, value, "needs a list of texts")
        return tuple(value)

    def error(self, name: str, value: object, needs: str) -> ModelError:
        """Return the error about a value. needs: what the method needs or supports, a phrase that
        begins with the verb."""
        return ModelError(
            f"the checkpoint's quantization_config has {self.place}{name}={value!r}; "
            f"{self.method} {needs}"
        )

    def say_activations_are_not_quantized(self) -> None:
        """Tell in the log that the checkpoint asks for quantized activations. Called once, while
        the method is built."""
        log.info(
            (
                "%s: the activations are not quantized; the weights are used exactly as they are "
                "stored"
            ),
            self.method,
        )


def matches(module: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns means the module: a whole path, the last or any inner
    names of a path ("self_attn.q_proj", "lm_head"), a path with wildcards ("model.layers.0.*"), or
    "re:" and a regular expression for the beginning of the path."""
    dotted = f".{module}."
    for pattern in patterns:
        if pattern.startswith("re:"):
            if _regex(pattern[3:]).match(module):
                return True
        elif "*" in pattern:
            if fnmatchcase(module, pattern):
                return True
        elif f".{pattern.strip('.')}." in dotted:
            return True
    return False


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ModelError(
            f"the checkpoint's quantization_config has the pattern {text!r}: {error}"
        ) from error
