"""Splits a tool's schema into the cases of a value, for formats of calls that are not JSON. If a
format cannot enforce a schema, a RequestError says so, because `strict` is either enforced or
refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pegboard.errors import RequestError
from pegboard_chat.parsing.json_schema import (
    KEYWORDS,
    TYPES,
    exclude_each_other,
    resolve,
    restrictions,
    subschemas,
)
from pegboard_chat.parsing.regex_syntax import can_match
from pegboard_chat.parsing.structural_tag import ANY, Format, regex, searched

Schema = Mapping[str, Any]

MAX_DEPTH = 16
"""Maximum depth of references and nested values, because a schema that refers to itself has no
end."""
DEFINITIONS = ("$defs", "definitions")
LONG = "(?:0[13578]|1[02])"
SHORT = "(?:0[469]|11)"
DATE = (
    rf"[1-9][0-9]{{3}}-(?:{LONG}-(?:0[1-9]|[12][0-9]|3[01])"
    rf"|{SHORT}-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
"""The pattern of a date. 29 February is excluded, because it depends on the year. The year 0 is
excluded, because Python does not have it."""
TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
FORMATS: Mapping[str, str] = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
}
"""The format of a string → its pattern."""


def refuse(what: str) -> NoReturn:
    """Return a RequestError: the tool cannot be strict."""
    raise RequestError(
        f"a strict tool's schema cannot be enforced with this model's format of calls: {what}",
        parameter="tools",
    )


@dataclass(frozen=True)
class Cases:
    """The cases of a value: one of `constants`, or a value that follows one of `schemas`. Each of
    these schemas has one type, or none, which allows any value."""

    constants: tuple[Any, ...]
    schemas: tuple[Schema, ...]


def cases(schema: Any, root: Schema) -> Cases:
    """Return the cases of a schema. root: the schema in which references are looked up."""
    constants: list[Any] = []
    schemas: list[Schema] = []
    for part in _alternatives(schema, root, 0):
        used = restrictions(part)
        if used & {"const", "enum"}:
            constants += _constants(part, used)
        elif not used:
            schemas.append({})
        elif "type" not in used:
            refuse(f"{', '.join(sorted(used))} without type")
        else:
            schemas += _by_type(part, used)
    return Cases(tuple(constants), tuple(schemas))


def _alternatives(schema: Any, root: Schema, depth: int) -> Iterator[Schema]:
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        refuse(
            "it refers to itself"
            if depth > MAX_DEPTH
            else f"{json.dumps(schema)} where a schema should be"
        )
    used = restrictions(schema)
    for alone in ("$ref", "anyOf", "oneOf", "allOf"):
        if alone not in used:
            continue
        if used - {alone}:
            refuse(f"{alone} next to {', '.join(sorted(used - {alone}))}")
        value = schema[alone]
        if alone == "$ref":
            value = [_target(root, value)]
        elif not isinstance(value, list) or not value or alone == "allOf" and len(value) > 1:
            refuse(f"{alone} of several schemas" if value else f"{alone} without schemas")
        elif alone == "oneOf" and not exclude_each_other(value, root):
            refuse("oneOf whose branches do not visibly exclude each other")
        for inner in value:
            yield from _alternatives(inner, root, depth + 1)
        return
    yield schema


def _target(root: Schema, reference: Any) -> Any:
    try:
        return resolve(root, reference)
    except (LookupError, ValueError, TypeError, AttributeError):
        refuse(f"$ref {reference!r} leads nowhere inside the schema")


def _constants(schema: Schema, used: set[str]) -> list[Any]:
    values = [schema["const"]] if "const" in used else schema["enum"]
    if used - {"type"} not in ({"const"}, {"enum"}) or not isinstance(values, list):
        refuse(f"{', '.join(sorted(used))} together")
    names = _names(schema)
    names += ["integer"] if "number" in names else []
    return [value for value in values if not names or type_of(value) in names]


def _by_type(schema: Schema, used: set[str]) -> Iterator[Schema]:
    if unknown := used & (KEYWORDS["any"] - {"type"}):
        refuse(min(unknown))
    for name in _names(schema):
        speaking = KEYWORDS.get("number" if name == "integer" else name, frozenset())
        if name not in TYPES:
            refuse(f"type {name!r}")
        yield {
            "type": name,
            **{key: value for key, value in schema.items() if key in used & speaking},
        }


def _names(schema: Schema) -> list[str]:
    value = schema.get("type", [])
    return [str(name) for name in value] if isinstance(value, list) else [str(value)]


def type_of(value: object) -> str:
    """Return the JSON type of a value. It is "integer" for a whole number that is not a float."""
    if value is None:
        return "null"
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "object"


def self_contained(schema: Schema, root: Schema) -> Schema:
    """Return a part of `root` as a separate schema with the definitions that it refers to."""
    references = [
        inner["$ref"]
        for _, inner in subschemas(schema)
        if isinstance(inner, Mapping) and "$ref" in inner
    ]
    if not references:
        return schema
    definitions = {key: root[key] for key in DEFINITIONS if key in root}
    further = [
        inner["$ref"]
        for _, inner in subschemas(definitions)
        if isinstance(inner, Mapping) and "$ref" in inner
    ]
    for reference in (*references, *further):
        if not str(reference).startswith(tuple(f"#/{key}/" for key in DEFINITIONS)):
            refuse(f"$ref {reference!r} inside a value to something that is not in $defs")
    return {**schema, **definitions}


@dataclass(frozen=True)
class Members:
    """The members of an object: its properties by name in the schema's order, each with whether it
    is required; or a map whose values all follow `values`. values is None if only the named
    properties are allowed."""

    properties: tuple[tuple[str, Any, bool], ...]
    values: Any = None


def members(schema: Schema) -> Members:
    """Return the members of an object. If its schema names properties, it has no others, whatever
    `additionalProperties` says."""
    used = restrictions(schema) - {"type", "properties", "required", "additionalProperties"}
    if used:
        refuse(", ".join(sorted(used)))
    required = schema.get("required", [])
    others = schema.get("additionalProperties", True)
    properties = schema.get("properties")
    if properties is None and others is not False:
        if required:
            refuse(f"required {required[0]!r} is not among the properties")
        return Members((), others)
    properties = properties or {}
    if missing := [name for name in required if name not in properties]:
        refuse(f"required {missing[0]!r} is not among the properties")
    return Members(tuple((name, inner, name in required) for name, inner in properties.items()))


def characters(
    schema: Schema,
    free: Format,
    one: str,
    excludes: Sequence[str],
    in_pattern: Sequence[str],
    forbidden: str,
) -> Format:
    """Return the format of the inside of a string that follows its schema. free: a pattern for any
    string. one: a pattern for one character, used for strings with lengths. excludes: words that
    these characters must not form. in_pattern: words that strings with a pattern must not contain.
    If the pattern cannot match any of the `forbidden` characters, its strings contain none of these
    words."""
    used = restrictions(schema) - {"type"}
    if not used:
        return free
    if used <= {"minLength", "maxLength"}:
        return regex(
            f"{one}{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}", excludes
        )
    if used == {"pattern"}:
        pattern = searched(schema["pattern"])
        if pattern is None:
            refuse(f"the pattern {schema['pattern']!r}, which has anchors inside")
        return regex(pattern, in_pattern if ANY in pattern or can_match(pattern, forbidden) else ())
    if used == {"format"} and schema["format"] in FORMATS:
        return regex(FORMATS[schema["format"]])
    refuse(
        f"format {schema['format']!r}"
        if used == {"format"}
        else f"{', '.join(sorted(used))} together"
    )
