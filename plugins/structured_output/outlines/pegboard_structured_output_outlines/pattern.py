"""Writes every constraint as one regular expression, and refuses what cannot be one. Imports nothing heavy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from pegboard.interfaces.structured_output import Constraint, StructuredOutputNeed
from pegboard_chat.parsing.json_schema import Dialect, Schema, problem, subschemas
from pegboard_chat.parsing.regex_syntax import can_match, expanded_size, features, with_ascii_classes, without_anchors

KINDS = ("json", "regex", "choice")
MAX_SIZE = 2000
"""Maximum size of a pattern with its repeats written out. The automaton is at least as large, and may be much larger."""

NOT_REGULAR = frozenset({"look-around", "backreference", "word boundary", "inner anchor", "atomic group", "excessive length"})
OUTSIDE_STRINGS = '"\\\\\n\x00\x1f'
"""Characters that a JSON string must not contain unescaped: a pattern for a string must not match them."""


def suits(need: StructuredOutputNeed) -> list[str]:
    """For `pegboard plugins why`: reasons against a constraint that is given with its text."""
    if need.constraint is None or need.text is None:
        return []
    text = need.text if isinstance(need.text, str) else json.dumps(need.text)
    reason = rejection(Constraint(need.constraint, text))  # type: ignore[arg-type]  # unknown kinds stop at `supports`
    return [] if reason is None else [reason]


def rejection(constraint: Constraint) -> str | None:
    """See `StructuredOutput.reject`."""
    if constraint.kind not in KINDS:
        return f"kind {constraint.kind!r} is not supported"
    if constraint.disable_any_whitespace:
        return "disable_any_whitespace is not supported; whitespace_pattern is"
    if constraint.kind == "regex":
        return _pattern_problem(constraint.text)
    return problem(json.loads(constraint.text), DIALECT) if constraint.kind == "json" else None


def pattern_of(constraint: Constraint) -> str:
    """The regular expression of a constraint that was not rejected. Raises ValueError when the library cannot write it."""
    if constraint.kind == "choice":
        longest_first = sorted(json.loads(constraint.text), key=len, reverse=True)  # the first match wins
        return "|".join(f"(?:{_literal(text)})" for text in longest_first)
    if constraint.kind == "regex":
        return with_ascii_classes(without_anchors(constraint.text))
    from outlines_core.json_schema import build_regex_from_schema

    schema = json.loads(constraint.text)
    for _, inner in subschemas(schema):
        if isinstance(inner, dict) and "pattern" in inner:
            inner["pattern"] = f"(?:{with_ascii_classes(without_anchors(inner['pattern']))})"
    pattern: str = build_regex_from_schema(json.dumps(schema), constraint.whitespace_pattern)
    return pattern


def _literal(text: str) -> str:
    """Not re.escape: it escapes the space, which this engine does not accept."""
    return re.sub(r"([\\.^$|?*+()\[\]{}\-&#~])", r"\\\1", text)


def _pattern_problem(pattern: str) -> str | None:
    wrong = features(pattern) & NOT_REGULAR
    if wrong:
        return f"{min(wrong)} in the pattern is not supported"
    size = expanded_size(pattern)
    return f"the pattern is too large: {size} with its repeats written out, at most {MAX_SIZE}" if size > MAX_SIZE else None


def _extra(schema: Schema) -> str | None:
    used = set(schema)
    if isinstance(schema.get("type"), list) and used & (DIALECT.string | DIALECT.array | DIALECT.object):
        return "several types with further keywords are not enforced"
    ways = [keys for keys in ({"pattern"}, {"format"}, {"minLength", "maxLength"}) if keys & used]
    if len(ways) > 1:
        return "pattern, format and lengths together are not enforced"
    if isinstance(schema.get("pattern"), str):
        if can_match(schema["pattern"], OUTSIDE_STRINGS):
            return "a pattern that can match quotes, backslashes or control characters is not enforced"
        return _pattern_problem(schema["pattern"])
    largest = max(
        [size for name in ("minLength", "maxLength", "minItems", "maxItems") if isinstance(size := schema.get(name), int)] or [0]
    )
    if largest > MAX_SIZE:
        return f"a size over {MAX_SIZE} takes too long to compile"
    if "prefixItems" in used and used & {"minItems", "maxItems", "items"}:
        return "prefixItems with other keywords is not enforced"
    return _object(schema)


def _object(schema: Schema) -> str | None:
    names = schema.get("properties", {})
    odd = next((name for name in names if json.dumps(name, ensure_ascii=False) != f'"{name}"'), None)
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
    extra=_extra,
)
