"""Grammars that allow free text but make calls follow their tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing.json_schema import restrictions
from pegboard_chat.parsing.structural_tag import (
    Format,
    constraint,
    either,
    json_value,
    optional,
    repeated,
    sequence,
    text,
    triggered,
)


def call_list(tools: Sequence[Mapping[str, Any]], between: str = ", ") -> Format:
    """Return a format for at least one call as JSON, {"name": …, "arguments": …}. The arguments of
    a tool that is `strict` must follow its schema."""
    call = either(
        *call_bodies(tools, lambda name: text(f'{{"name": {json.dumps(name)}, "arguments": '), "}")
    )
    return sequence(call, repeated(sequence(text(between), call)))


def call_bodies(
    tools: Sequence[Mapping[str, Any]],
    before: Callable[[str], Format],
    after: str = "",
    *,
    may_be_empty: bool = False,
) -> list[Format]:
    """Return one format per tool: its arguments as JSON, with the text before them, which depends
    on the tool's name, and the text after them. may_be_empty: {} may be left out.
    """
    bodies = []
    for function in (tool["function"] for tool in tools):
        schema = _schema(function)
        arguments = json_value(schema)
        if may_be_empty and not restrictions(schema) - {
            "type",
            "properties",
            "additionalProperties",
        }:
            arguments = optional(arguments)
        bodies.append(sequence(before(function["name"]), arguments, text(after)))
    return bodies


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    is_strict = function.get("strict") and function.get("parameters")
    schema: Mapping[str, Any] = function["parameters"] if is_strict else {"type": "object"}
    return schema


def constrained_calls(
    tools: Sequence[Mapping[str, Any]],
    begin: Callable[[str], str],
    end: str,
    triggers: Sequence[str],
) -> Constraint | None:
    """Return a structural tag in which a call must follow a trigger. None: no tools were given. The
    arguments follow the tool's schema if the tool is `strict`; otherwise they are any object.
    begin: given a function's name, all text before its arguments, including the trigger. end: all
    text after them.
    """
    structures = []
    for tool in tools:
        function = tool["function"]
        structures.append(
            {"begin": begin(function["name"]), "schema": _schema(function), "end": end}
        )
    if not structures:
        return None
    tag = {"type": "structural_tag", "structures": structures, "triggers": list(triggers)}
    return Constraint("structural_tag", json.dumps(tag, ensure_ascii=False))


def constrained_lists(
    tools: Sequence[Mapping[str, Any]],
    marks: Sequence[tuple[str, str]],
    brackets: tuple[str, str] = ("[", "]"),
    between: str = ", ",
) -> Constraint | None:
    """Return a structural tag in which a JSON list of calls must follow a trigger. None: no tools
    were given. All other text is free. marks: (trigger, its end marker). brackets, between: the
    beginning and end of the list, and the text between its calls.
    """
    if not tools:
        return None
    calls = call_list(tools, between)
    tags = [(f"{begin}{brackets[0]}", calls, f"{brackets[1]}{end}") for begin, end in marks]
    return constraint(triggered([begin for begin, _ in marks], tags))
