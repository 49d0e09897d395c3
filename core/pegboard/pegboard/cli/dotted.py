"""Flags with dots: options of plugins, `--kind.name.field value`, and one value inside a mapping, `--setting.key value`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.cli.usage import UsageError
from pegboard.config.vllm_names import Layer
from pegboard.interfaces import KINDS
from pegboard.plugins.names import did_you_mean


def split_dotted(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Take `--a.b.c value` and `--a.b.c=value` out of the words; (the rest, [("a.b.c", "value")])."""
    rest: list[str] = []
    dotted: list[tuple[str, str]] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if not (word.startswith("--") and "." in name):
            rest.append(word)
            continue
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise UsageError(f"{name} needs a value")
        dotted.append((name.removeprefix("--"), value))
    return rest, dotted


def place_dotted(layer: Layer, path: str, value: str, mappings: Mapping[str, str]) -> None:
    """Put one dotted flag into the layer. mappings: settings that hold a mapping → section of the layer. Raises UsageError."""
    head, *middle, last = path.split(".")
    head = head.replace("-", "_")
    if head in mappings:
        target = layer.setdefault(mappings[head], {}).setdefault(head, {})
        for key in middle:
            target = target.setdefault(key, {})
        target[last] = _json_or_text(value)
    elif head in KINDS and middle:
        options = layer.setdefault("plugins", {}).setdefault("options", {})
        options.setdefault(f"{head}.{'.'.join(middle)}", {})[last.replace("-", "_")] = value
    else:
        raise UsageError(f"unknown flag --{path}: expected --kind.name.field{did_you_mean(head, [*KINDS, *mappings])}")


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
