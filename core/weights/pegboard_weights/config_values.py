"""Checks the values of config.json against rules (`config_values.toml`) and against the index of
the stored tensors."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import TensorEntry

_NESTED = ("text_config", "rope_parameters", "rope_scaling")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "number": (int, float),
    "bool": (bool,),
    "text": (str,),
}
_MATRICES = (
    ("vocab_size", "hidden_size"),
    ("intermediate_size", "hidden_size"),
    ("num_attention_heads", "head_dim", "hidden_size"),
)
"""Sizes whose product is at most the size of one weight matrix of the model."""


@cache
def _rules() -> list[tuple[re.Pattern[str], Mapping[str, Any]]]:
    rules = tomllib.loads(Path(__file__).with_name("config_values.toml").read_text("utf-8"))["rule"]
    return [(re.compile(rule["keys"]), rule) for rule in rules]


def check_config(path: Path, config: Mapping[str, Any], tensors: Collection[TensorEntry]) -> None:
    """Raise ModelError if a value of the config cannot be right: a wrong type, a number out of
    range or sizes that the stored tensors cannot fill. Nothing is allocated before this. path: of
    the config, for the error."""
    for place, name, value in _values(config):
        rule = next(
            (rule for keys, rule in _rules() if keys.fullmatch(name)), {"type": "", "lists": True}
        )
        for item in value if isinstance(value, list) and rule.get("lists") else [value]:
            if expected := _unfit(item, rule):
                raise ModelError(f"{path} has {place}{name}={_shown(value)}, expected {expected}")
    if not tensors:
        return
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    if isinstance(layers := text.get("num_hidden_layers"), int) and layers > len(tensors):
        raise ModelError(
            f"{path} has num_hidden_layers={layers}, but only {len(tensors)} tensors are stored"
        )
    num_bits = 8 * sum(tensor.num_bytes for tensor in tensors)
    for names in _MATRICES:
        sizes = [size for name in names if isinstance(size := text.get(name), int)]
        if len(sizes) == len(names) and math.prod(sizes) > num_bits:
            values = " and ".join(f"{name}={text[name]}" for name in names)
            raise ModelError(
                f"{path} has {values}, which is more than the {num_bits // 8} stored bytes can hold"
            )


def _values(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (place, name, value) of a config and of its parts that describe the language model,
    without values that are null."""
    for name, value in config.items():
        is_rope = place.endswith(("rope_parameters.", "rope_scaling."))
        # some models have rope_parameters per type of layer
        if isinstance(value, Mapping) and (name in _NESTED or is_rope):
            yield from _values(value, f"{place}{name}.")
        elif name in _NESTED and value is not None:
            raise ModelError(f"config.json has {place}{name}={_shown(value)}, expected an object")
        elif value is not None:
            yield place, name, value


def _unfit(value: Any, rule: Mapping[str, Any]) -> str:
    """Return what was expected, or "" if the value fits the rule."""
    allowed = _TYPES.get(rule["type"])
    least = rule.get("least", -math.inf)
    most = rule.get("most", math.inf)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    wrong = allowed is not None and (
        not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)
    )
    if wrong or (is_number and not least <= value <= most):  # NaN is not between any limits
        return f"{rule['type'] or 'number'}" + (
            f" from {least} to {most}" if "most" in rule else ""
        )
    return ""


def _shown(value: Any) -> str:
    text = (
        repr(value)
        if not isinstance(value, int) or abs(value) < 10**40
        else "a number of over 40 digits"
    )
    return text if len(text) <= 80 else f"{text[:80]}…"
