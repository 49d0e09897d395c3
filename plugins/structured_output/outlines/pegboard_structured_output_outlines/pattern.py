"""Writes every constraint as one regular expression, and refuses constraints that cannot be written
in this way. This module imports nothing heavy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing.constraint_size import SizeLimits, excess
from pegboard_chat.parsing.json_schema import (
    Dialect,
    Schema,
    problem,
    resolve,
    subschemas,
    suits_by,
)
from pegboard_chat.parsing.regex_syntax import (
    expanded_size,
    is_wide,
    pattern_problem,
    string_problem,
    with_ascii_classes,
    without_anchors,
)

KINDS = ("json", "regex", "choice")
MAX_SIZE = 500
"""The largest size of a pattern with its repeats written out. The automaton is at least as large,
and may be much larger."""

SIZES = SizeLimits(
    properties=50, optional=10, values=100, branches=20, parts=2000, rules=0, characters=2000
)
"""Measured with a vocabulary of 49,152 tokens: what is smaller compiles in a few seconds at most,
within 100 MB."""

MAX_WRITTEN = 10_000
"""The largest number of characters of a schema as a pattern."""

MAX_STATES = 1000
"""The largest number of states of an automaton. It is built in up to 10 ms per state."""

MAX_WIDE = 64
"""The largest number of places in a pattern where most characters may follow, with repeats written
out. Each takes 1 MiB and up to 0.1 s with a vocabulary of 49,152 tokens."""

NOT_REGULAR = frozenset(
    {
        "look-around",
        "backreference",
        "word boundary",
        "inner anchor",
        "atomic group",
        "excessive length",
    }
)


def rejection(constraint: Constraint) -> str | None:
    """See `StructuredOutput.reject`."""
    if constraint.kind not in KINDS:
        return f"kind {constraint.kind!r} is not supported"
    if constraint.disable_any_whitespace:
        return "disable_any_whitespace is not supported; whitespace_pattern is"
    if (reason := excess(constraint, SIZES)) is not None:
        return reason
    if constraint.kind == "regex":
        return _pattern(constraint.text)
    return problem(json.loads(constraint.text), DIALECT) if constraint.kind == "json" else None


def pattern_of(constraint: Constraint) -> str:
    """Returns the regular expression of a constraint that was not rejected. Raises ValueError when
    the library cannot write it."""
    if constraint.kind == "choice":
        # the first match wins
        longest_first = sorted(json.loads(constraint.text), key=len, reverse=True)
        return "|".join(f"(?:{_literal(text)})" for text in longest_first)
    if constraint.kind == "regex":
        return with_ascii_classes(without_anchors(constraint.text))
    from outlines_core.json_schema import build_regex_from_schema

    schema = json.loads(constraint.text)
    if written_size(schema) > MAX_WRITTEN:
        raise ValueError(
            f"the schema is too large: as one pattern it has over {MAX_WRITTEN} characters"
        )
    for _, inner in subschemas(schema):
        if isinstance(inner, dict) and "pattern" in inner:
            inner["pattern"] = f"(?:{with_ascii_classes(without_anchors(inner['pattern']))})"
    pattern: str = build_regex_from_schema(json.dumps(schema), constraint.whitespace_pattern)
    return pattern


def too_wide(pattern: str) -> str | None:
    """Return a reason against a pattern that may continue with most characters in too many
    places."""
    if (size := expanded_size(pattern, is_wide)) <= MAX_WIDE:
        return None
    return (
        f"the pattern is too large: most characters may follow in {size} places, at most {MAX_WIDE}"
    )


def written_size(schema: Any) -> int:
    """Returns about how many characters the library writes for the schema. It writes the items of
    an array twice, what a reference leads to at each reference, and optional properties once for
    each way to leave out the others. No reference may be circular."""
    known: dict[int, int] = {}

    def size(part: Any) -> int:
        if not isinstance(part, Mapping):
            return 10
        if id(part) not in known:
            known[id(part)] = min(_own(part), 10 * MAX_WRITTEN)
        return known[id(part)]

    def _own(part: Schema) -> int:
        if "$ref" in part:
            return size(resolve(schema, part["$ref"]))
        total = 20 + len(json.dumps([part.get(key) for key in ("enum", "const", "pattern")]))
        named = part.get("properties", {})
        num_optional = len(named.keys() - set(part.get("required", ())))
        total += (1 + num_optional) * sum(len(name) + size(inner) for name, inner in named.items())
        total += sum(
            map(
                size,
                (
                    inner
                    for key in ("anyOf", "oneOf", "allOf", "prefixItems")
                    for inner in part.get(key, ())
                ),
            )
        )
        return total + 2 * sum(
            size(part[key]) for key in ("items", "additionalProperties") if key in part
        )

    return size(schema)


def _literal(text: str) -> str:
    """Escapes a text. re.escape cannot be used: it escapes the space, which this engine does not
    accept."""
    return re.sub(r"([\\.^$|?*+()\[\]{}\-&#~])", r"\\\1", text)


def _pattern(pattern: str) -> str | None:
    return pattern_problem(pattern, NOT_REGULAR, MAX_SIZE)


def _extra(schema: Schema) -> str | None:
    largest = max(
        [
            size
            for name in ("minLength", "maxLength", "minItems", "maxItems")
            if isinstance(size := schema.get(name), int)
        ]
        or [0]
    )
    if largest > MAX_SIZE:
        return f"a size over {MAX_SIZE} takes too long to compile"
    if "prefixItems" in schema and schema.keys() & {"minItems", "maxItems", "items"}:
        return "prefixItems with other keywords is not enforced"
    return _object(schema)


def _object(schema: Schema) -> str | None:
    names = schema.get("properties", {})
    odd = next(
        (name for name in names if json.dumps(name, ensure_ascii=False) != f'"{name}"'), None
    )
    if odd is not None:
        return f"the property name {odd!r} is not supported"
    is_object = schema.get("type") == "object" or "additionalProperties" in schema
    if is_object and not names and not isinstance(schema.get("additionalProperties"), Mapping):
        return "an object without properties is too large for a pattern"
    return None


DIALECT = Dialect(
    string=frozenset({"minLength", "maxLength", "pattern", "format"}),
    number=frozenset(),
    array=frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    object=frozenset({"properties", "required", "additionalProperties"}),
    formats=frozenset({"uuid"}),
    is_recursive=False,
    several_types=False,
    pattern=lambda pattern: string_problem(pattern) or _pattern(pattern),
    extra=_extra,
)
suits = suits_by(rejection)
