"""Writes constraints as llguidance's own grammar text. The library itself refuses the features that
it does not implement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing.constraint_size import SizeLimits, excess
from pegboard_chat.parsing.json_schema import mistake, subschemas, suits_by
from pegboard_structured_output_llguidance import tag_grammar

SIZES = SizeLimits(
    properties=1000,
    optional=1000,
    values=5000,
    branches=500,
    parts=20000,
    rules=1000,
    characters=16384,
)
"""Measured with a vocabulary of 49,152 tokens: what is smaller compiles in a few seconds at most,
within 100 MB."""


@suits_by
def suits(constraint: Constraint) -> str | None:
    """An error of a constraint, found by the checks here or by the library."""
    import llguidance

    try:
        return (
            rejection(constraint)
            or llguidance.LLMatcher.validate_grammar(grammar_text(constraint))
            or None
        )
    except (ValueError, KeyError, TypeError) as error:
        return str(error)


def rejection(constraint: Constraint) -> str | None:
    """See `StructuredOutput.reject`: the checks that are too cheap to need a thread."""
    if (reason := excess(constraint, SIZES)) is not None:
        return reason
    if constraint.kind == "structural_tag" and "structures" not in (
        tag := json.loads(constraint.text)
    ):
        return tag_grammar.rejection(tag)
    if constraint.kind == "json":
        schema = json.loads(constraint.text)
        if (reason := mistake(schema)) is not None:
            return reason
        for path, inner in subschemas(schema):
            if (
                isinstance(inner, Mapping)
                and inner.get("minProperties", 0) > 1
                and inner.get("additionalProperties") is not False
            ):
                return f"minProperties at {path} is not enforced: a free property may occur twice"
    return None


def special_ids(constraint: Constraint) -> frozenset[int]:
    """Returns the ids of the tokens that a structural tag names."""
    if constraint.kind != "structural_tag":
        return frozenset()
    ids = set()
    waiting = [json.loads(constraint.text)]
    while waiting:
        form = waiting.pop()
        if isinstance(form, Mapping) and form.get("type") == "token":
            ids.add(form["token"])
        elif isinstance(form, Mapping | list):
            waiting += form.values() if isinstance(form, Mapping) else form
    return frozenset(ids)


def grammar_text(constraint: Constraint) -> str:
    """Writes the grammar. Raises ValueError (or KeyError, TypeError from a tag) for a constraint
    that cannot be written. Whether the grammar is valid shows only when a matcher is made from
    it."""
    import llguidance

    matcher = llguidance.LLMatcher
    if constraint.kind in ("json", "json_object"):
        return _json(constraint)
    if constraint.kind == "regex":
        # ASCII forms of \d, \w, \s, which work in every dialect
        pattern = llguidance.regex_to_lark(constraint.text, "dws")
        return str(matcher.grammar_from_lark(f"start: /{pattern}/"))
    if constraint.kind == "choice":
        choices = " | ".join(
            json.dumps(text, ensure_ascii=False) for text in json.loads(constraint.text)
        )
        return str(matcher.grammar_from_lark(f"start: {choices}"))
    if constraint.kind == "structural_tag":
        tag = json.loads(constraint.text)
        return (
            _structures(tag)
            if "structures" in tag
            else str(matcher.grammar_from_lark(tag_grammar.tag_grammar(tag)))
        )
    return str(llguidance.grammar_from("grammar", constraint.text))  # EBNF becomes Lark


def _json(constraint: Constraint) -> str:
    import llguidance

    schema = json.loads(constraint.text) if constraint.kind == "json" else {"type": "object"}
    if constraint.disable_additional_properties and constraint.kind == "json":
        close(schema)
    # a schema may contain its own settings, but not these
    overrides: Any = {"lenient": False, "coerce_one_of": False}
    overrides["whitespace_flexible"] = not constraint.disable_any_whitespace
    if constraint.whitespace_pattern is not None:
        overrides["whitespace_pattern"] = constraint.whitespace_pattern
    return str(
        llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)
    )


def close(schema: Any) -> None:
    """Forbid further properties in objects that do not mention them, in place."""
    for _, inner in subschemas(schema):
        if not isinstance(inner, dict) or not (
            "properties" in inner or inner.get("type") == "object"
        ):
            continue
        if not {"additionalProperties", "patternProperties", "unevaluatedProperties"} & set(inner):
            inner["additionalProperties"] = False


def _structures(tag: Mapping[str, Any]) -> str:
    import llguidance

    triggers = tag["triggers"]
    parts = []
    for item in tag["structures"]:
        begin = item["begin"]
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if not trigger:
            raise ValueError(
                f"structural_tag: begin {begin!r} starts with none of the triggers {triggers}"
            )
        parts.append(
            llguidance.StructTag(
                trigger=trigger, begin=begin, grammar=item.get("schema") or {}, end=item["end"]
            )
        )
    if not parts:
        raise ValueError("structural_tag: structures must not be empty")
    return str(llguidance.StructTag.to_grammar(parts, assume_special=False))
