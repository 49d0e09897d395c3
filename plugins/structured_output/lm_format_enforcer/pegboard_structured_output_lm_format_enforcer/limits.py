"""Refuses what lm-format-enforcer does not enforce, because the library ignores unknown keywords.
This module imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing.constraint_size import SizeLimits, excess
from pegboard_chat.parsing.json_schema import Dialect, Schema, problem, subschemas, suits_by
from pegboard_chat.parsing.regex_syntax import pattern_problem, string_problem

KINDS = ("json", "json_object", "regex", "choice")
MAX_SIZE = 500
"""The largest size of a pattern with its repeats written out. Its automaton is built in Python,
which is slow."""

SIZES = SizeLimits(
    properties=500, optional=500, values=500, branches=30, parts=5000, rules=0, characters=2000
)
"""Measured with a vocabulary of 49,152 tokens: what is smaller compiles in a few seconds at most,
within 100 MB."""

MAX_STATES = 300
"""The largest number of states of an automaton."""

NOT_SUPPORTED = frozenset(
    {
        "look-around",
        "backreference",
        "word boundary",
        "inner anchor",
        "inline flag",
        "unicode property",
        "excessive length",
    }
)
DEFINITIONS = ("#/$defs/", "#/definitions/")


def rejection(constraint: Constraint) -> str | None:
    """See `StructuredOutput.reject`."""
    if constraint.kind not in KINDS:
        return f"kind {constraint.kind!r} is not supported"
    if constraint.disable_any_whitespace or constraint.whitespace_pattern is not None:
        return "whitespace cannot be controlled"
    if (reason := excess(constraint, SIZES)) is not None:
        return reason
    if constraint.kind == "regex":
        return _pattern(constraint.text)
    return _schema(json.loads(constraint.text)) if constraint.kind == "json" else None


def needs_plain_strings(schema: Any) -> bool:
    """True if a string has minLength. Such strings must not contain escapes, because the library
    counts an escape as the characters that it is written with."""
    return any(
        isinstance(inner, Mapping) and "minLength" in inner for _, inner in subschemas(schema)
    )


def patterns(constraint: Constraint) -> list[str]:
    """Returns the regular expressions in the constraint."""
    if constraint.kind != "json":
        return [constraint.text] if constraint.kind == "regex" else []
    inner = [
        inner for _, inner in subschemas(json.loads(constraint.text)) if isinstance(inner, Mapping)
    ]
    return [schema["pattern"] for schema in inner if isinstance(schema.get("pattern"), str)]


def literals(constraint: Constraint) -> list[str]:
    """Returns the texts that the output must contain unchanged."""
    if constraint.kind == "choice":
        return list(json.loads(constraint.text))
    texts: list[str] = []
    for _, inner in subschemas(json.loads(constraint.text)) if constraint.kind == "json" else ():
        if isinstance(inner, Mapping):
            listed = [*inner.get("enum", []), inner.get("const"), *inner.get("properties", ())]
            texts += [value for value in listed if isinstance(value, str)]
    return texts


def _pattern(pattern: str) -> str | None:
    return pattern_problem(pattern, NOT_SUPPORTED, MAX_SIZE)


def _schema(schema: Any) -> str | None:
    if isinstance(schema, bool) or not schema.keys() - {"title", "description", "$schema", "$id"}:
        return "a schema without type is not supported"
    reason = problem(schema, DIALECT)
    if reason is None and "$defs" in schema and "definitions" in schema:
        reason = "$defs and definitions together are not supported"
    for path, inner in subschemas(schema):
        if reason is None and isinstance(inner, Mapping):
            reason = _combined(path, inner)
    return reason


def _combined(path: str, schema: Schema) -> str | None:
    """Checks references and constants, which `Dialect.extra` does not see."""
    reference = schema.get("$ref")
    if reference is not None and (
        reference.rpartition("/")[0] + "/" not in DEFINITIONS or "~" in reference
    ):
        return (
            f"$ref {reference!r} at {path} is not supported: only names in $defs or definitions are"
        )
    listed = [schema["const"]] if "const" in schema else schema.get("enum", [])
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in listed]
    if any(isinstance(value, str) and _is_odd(value) for value in listed):
        return f"text that needs escapes at {path} is not supported"
    if not all(isinstance(value, str) for value in listed) and (
        "const" in schema or not all(numbers)
    ):
        return f"values at {path} that are neither all text nor all numbers are not supported"
    return None


def _is_odd(text: str) -> bool:
    return not text or json.dumps(text, ensure_ascii=False) != f'"{text}"'


def _extra(schema: Schema) -> str | None:
    if "type" not in schema and schema.keys() & (DIALECT.array | DIALECT.object):
        return "a schema without type is not supported"
    names = schema.get("properties")
    if any(map(_is_odd, names or ())):
        return "a property name that needs escapes is not supported"
    if schema.get("additionalProperties") is False and not names:
        return "an object that must be empty is not supported"
    return None


DIALECT = Dialect(
    string=frozenset({"minLength", "maxLength", "pattern"}),
    number=frozenset(),
    array=frozenset({"items", "minItems", "maxItems"}),
    object=frozenset({"properties", "required", "additionalProperties"}),
    one_of=False,
    several_types=False,
    pattern=lambda pattern: string_problem(pattern) or _pattern(pattern),
    extra=_extra,
)
suits = suits_by(rejection)
