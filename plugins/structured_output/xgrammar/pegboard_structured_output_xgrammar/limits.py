"""Refuses what xgrammar does not enforce. The library ignores some keywords, with or without a
warning. This module imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing.constraint_size import SizeLimits, excess
from pegboard_chat.parsing.json_schema import (
    Dialect,
    Schema,
    problem,
    restrictions,
    subschemas,
    suits_by,
)
from pegboard_chat.parsing.regex_syntax import expanded_size, features, mistake, repeats_repeats

FORMATS = frozenset(
    {
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv6",
        "uuid",
        "uri",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
    }
)
PLAIN_FORMATS = frozenset({"date", "time", "date-time", "duration", "hostname", "ipv6", "uuid"})
"""Formats whose strings consist of letters, digits and a few signs. No excluded word looks like one
of these."""
LIMITS = frozenset({"minLength", "maxLength", "pattern", "format"})
"""Keywords that limit strings."""
MAX_LENGTH = 128
"""The largest length of strings. Compile time grows with it, up to seconds."""

SIZES = SizeLimits(
    properties=2000,
    optional=200,
    values=5000,
    branches=500,
    parts=20000,
    rules=5000,
    characters=65536,
)
"""Measured with a vocabulary of 49,152 tokens: what is smaller compiles in a few seconds at most,
within 100 MB."""

LARGE = 8192
MAX_BRANCHES = 50
MAX_CHARACTERS = 512
"""A schema may be slow if it has more characters, more branches of all anyOf and oneOf, or larger
lengths and sizes together."""

LENGTHS = ("minLength", "maxLength", "minItems", "maxItems")

BAD_FEATURES = frozenset({"inner anchor", "excessive length"})
"""Features of regular expressions that are ignored with a warning. Other features are errors when
compiling."""


def rejection(constraint: Constraint) -> str | None:
    """See `StructuredOutput.reject`."""
    if constraint.whitespace_pattern is not None:
        return "whitespace_pattern is not supported"
    if (reason := excess(constraint, SIZES)) is not None:
        return reason
    if constraint.kind == "regex":
        return _regex(constraint.text)
    if constraint.kind == "grammar" and "::=" not in constraint.text:
        return "the grammar is not EBNF (no rule with ::=)"
    if constraint.kind == "json":
        return problem(json.loads(constraint.text), DIALECT)
    if constraint.kind == "structural_tag":
        return _tag(json.loads(constraint.text))
    return None


def may_be_slow(constraint: Constraint) -> bool:
    """Return whether a mask, a token or the compilation could take very long: a grammar, a long
    pattern or one with repeats of repeats, or a JSON schema that is large or has many branches."""
    if constraint.kind == "regex":
        return _is_slow(constraint.text)
    if constraint.kind == "grammar" or len(constraint.text) > LARGE:
        return True
    return constraint.kind in ("json", "structural_tag") and _has_slow(json.loads(constraint.text))


def _is_slow(pattern: str) -> bool:
    return repeats_repeats(pattern) or expanded_size(pattern) > MAX_LENGTH


def _has_slow(root: Any) -> bool:
    num_branches = 0
    num_characters = 0
    waiting = [root]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, Mapping):
            waiting += part.values()
            num_branches += sum(
                len(part[key]) for key in ("anyOf", "oneOf") if isinstance(part.get(key), list)
            )
            num_characters += sum(
                value for key in LENGTHS if isinstance(value := part.get(key), int)
            )
            if num_branches > MAX_BRANCHES or num_characters > MAX_CHARACTERS or "grammar" in part:
                return True
            if isinstance(text := part.get("pattern"), str) and _is_slow(text):
                return True
    return False


def _tag(value: Any) -> str | None:
    """Returns the first problem of a JSON schema or a pattern inside a structural tag."""
    if isinstance(value, list):
        return next((reason for reason in map(_tag, value) if reason), None)
    if not isinstance(value, Mapping):
        return None
    if "special_tokens" in value:
        return "special tokens in structural tags are not enforced"
    if value.get("type") == "regex" and isinstance(value.get("pattern"), str):
        return (
            "words that a pattern excludes are not enforced"
            if value.get("excludes")
            else _regex(value["pattern"])
        )
    key = (
        "json_schema"
        if value.get("type") == "json_schema"
        else "schema"
        if "begin" in value
        else None
    )
    if key in value:
        return problem(value[key], DIALECT) or (
            _unfiltered(value[key]) if value.get("excludes") else None
        )
    return _tag(list(value.values()))


def tag_schemas(value: Any) -> Iterator[Any]:
    """Yields the JSON schemas inside a structural tag."""
    if isinstance(value, list):
        for inner in value:
            yield from tag_schemas(inner)
    elif isinstance(value, Mapping):
        key = (
            "json_schema"
            if value.get("type") == "json_schema"
            else "schema"
            if "begin" in value
            else None
        )
        yield from [value[key]] if key in value else tag_schemas(list(value.values()))


def _unfiltered(schema: Any) -> str | None:
    """Refuses strings from which the library does not exclude words, and strings whose limits it
    drops when it excludes words."""
    for path, inner in subschemas(schema):
        used = restrictions(inner) if isinstance(inner, Mapping) else set()
        if (
            used & {"minLength", "maxLength", "pattern"}
            or "format" in used
            and inner["format"] not in PLAIN_FORMATS
        ):
            return (
                f"excluded words together with {', '.join(sorted(used & LIMITS))} at {path} are "
                "not enforced"
            )
    return None


def has_lengths(schema: Any) -> bool:
    """True if any string has minLength or maxLength."""
    inner = (part for _, part in subschemas(schema) if isinstance(part, Mapping))
    return any({"minLength", "maxLength"} & restrictions(part) for part in inner)


def _regex(pattern: str) -> str | None:
    wrong = features(pattern) & BAD_FEATURES
    return f"{min(wrong)} in the pattern is not enforced" if wrong else mistake(pattern)


def _extra(schema: Schema) -> str | None:
    """Refuses combinations of keywords of which the library ignores one."""
    used = schema.keys()
    if max(schema.get("minLength", 0), schema.get("maxLength", 0)) > MAX_LENGTH:
        return f"a length over {MAX_LENGTH} takes too long to compile"
    if "multipleOf" in used:
        if schema.get("type") != "integer" or not isinstance(schema["multipleOf"], int):
            return "multipleOf of numbers that are not integers is not enforced"
        if used & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}:
            return "multipleOf with a range is not enforced"
    if (
        "type" not in used
        and used & {"minItems", "maxItems"}
        and not used & {"items", "prefixItems"}
    ):
        return "minItems and maxItems without type or items are not enforced"
    if "propertyNames" in used and not _names_are_enforced(schema):
        return (
            "propertyNames is enforced only without properties, and only if it has pattern, "
            "lengths or an enum of texts"
        )
    if isinstance(schema.get("items"), list):
        return "items as a list is not enforced"
    return None


def _names_are_enforced(schema: Schema) -> bool:
    names = schema["propertyNames"]
    if not isinstance(names, Mapping) or restrictions(schema) & {
        "properties",
        "required",
        "patternProperties",
        "minProperties",
    }:
        return False
    is_text = names.get("type", "string") == "string" and all(
        isinstance(value, str) for value in names.get("enum", ())
    )
    return is_text and restrictions(names) <= {"type", "pattern", "minLength", "maxLength", "enum"}


DIALECT = Dialect(
    string=frozenset({"minLength", "maxLength", "pattern", "format"}),
    number=frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    array=frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    object=frozenset({"properties", "required", "additionalProperties", "propertyNames"}),
    formats=FORMATS,
    pattern=_regex,
    extra=_extra,
)
suits = suits_by(rejection)
