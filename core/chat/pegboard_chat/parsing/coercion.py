"""Converts values that a format writes as plain text to the JSON that the tool's schema asks
for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pegboard.interfaces.output_parser import Content
from pegboard_chat.parsing.json_text import SCALAR, take_json
from pegboard_chat.parsing.python_text import stream_python
from pegboard_chat.parsing.reader import Steps, TextReader, collected

MAX_DEPTH = 16
"""Maximum depth, because schemas may refer to themselves."""


def parameter_types(parameters: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that the schema of a tool's arguments allows for parameter `key`, or
    {"string"} if the schema does not say."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema, parameters, 0)) or frozenset({"string"})


def coerce(value: str, types: frozenset[str]) -> str:
    """Return JSON text for a plain value. Its type is the first of null, integer, number, boolean,
    object, array, string that is allowed and fits. If none fits, a value that is JSON is taken as
    JSON, and any other value as a string. Objects and arrays may be written in Python's
    notation."""
    bare = value.strip()
    if "null" in types and bare.lower() in ("null", "none"):
        return "null"
    if types & {"integer", "number"} and (number := _number(bare, "number" in types)) is not None:
        return number
    if "boolean" in types and bare.lower() in ("true", "false", "1", "0"):
        return "true" if bare.lower() in ("true", "1") else "false"
    for kind, opening in (("object", "{"), ("array", "[")):
        if kind in types and bare.startswith(opening) and (literal := _structure(bare)) is not None:
            return literal
    if "string" not in types and (literal := _whole(take_json, bare)) is not None:
        return literal
    return json.dumps(value, ensure_ascii=False)


def _number(bare: str, may_be_fraction: bool) -> str | None:
    """Return the number as it is written if that is already JSON, so that no digit is lost."""
    try:
        number = float(bare) if may_be_fraction and not bare.lstrip("+-").isdigit() else int(bare)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return bare if SCALAR.fullmatch(bare) else json.dumps(number)


def _structure(bare: str) -> str | None:
    structure = _whole(take_json, bare)
    if structure is None:
        structure = _whole(_take_python, bare)
    return structure


def _take_python(text: TextReader) -> Steps[str | None]:
    value, is_whole = yield from collected(stream_python(text, Content))
    return value if is_whole else None


def _whole(take: Any, value: str) -> str | None:
    """Return the result of `take` if it reads all of `value`."""
    text = TextReader()
    text.append(value)
    text.close()
    steps: Steps[str | None] = take(text)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value if text.is_at_end() else None


def _types(schema: object, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    types: set[str] = set()
    kind = schema.get("type")
    types.update(
        [kind]
        if isinstance(kind, str)
        else [k for k in kind if isinstance(k, str)]
        if isinstance(kind, list)
        else []
    )
    values = schema.get("enum")
    for value in [
        *(values if isinstance(values, list) else ()),
        *([schema["const"]] if "const" in schema else ()),
    ]:
        types.add(_type_of(value))
    for word in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(word)
        for choice in choices if isinstance(choices, list) else ():
            types |= _types(choice, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: object = root
        for part in reference[2:].split("/"):
            target = (
                target.get(part.replace("~1", "/").replace("~0", "~"))
                if isinstance(target, Mapping)
                else None
            )
        types |= _types(target, root, depth + 1)
    return types


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"
