"""Strict calls written as tags: each value is plain text that follows its parameter's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing.coercion import coerce, parameter_types
from pegboard_chat.parsing.schema_cases import cases, characters, members, refuse, self_contained
from pegboard_chat.parsing.structural_tag import (
    ANY_CHARACTER,
    INTEGER,
    NUMBER,
    Format,
    any_text,
    constraint,
    either,
    json_value,
    optional,
    regex,
    repeated,
    sequence,
    text,
    triggered,
)
from pegboard_chat.parsing.tags import KEY, STRING, TagFormat

PLAIN = {
    "null": "null",
    "boolean": "true|false",
    "integer": INTEGER,
    "number": NUMBER,
}
"""A type without limits → its pattern."""
NEW_KEY = r"[^<>\n\" \t]+"
"""The pattern of a parameter that no schema names."""


def constrained_tags(
    tools: Sequence[Mapping[str, Any]],
    tags: TagFormat,
    openings: Sequence[tuple[str, str]],
    end: str | None = None,
) -> Constraint | None:
    """Return a structural tag in which a call must follow a trigger. None: no tools were given. If
    the tool is `strict`, its parameters are in the order of the tool's schema, with or without the
    optional ones; otherwise any parameters are allowed. Strings contain nothing that ends a value.
    openings: (trigger, all text before the name, including the trigger). end: all text after the
    parameters, if it is more than the end of a call. Raises RequestError for a strict schema that
    cannot be enforced.
    """
    values = _Values(tags)
    parts = []
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") if function.get("strict") else None
        body = values.parameters(schema) if schema else repeated(values.parameter(None, {}, {}))
        parts += [
            (f"{before}{function['name']}{tags.name_end}{tags.line}", body, end or tags.end)
            for _, before in openings
        ]
    return constraint(triggered([trigger for trigger, _ in openings], parts)) if parts else None


class _Values:
    def __init__(self, tags: TagFormat) -> None:
        self.tags = tags
        self.words = (tags.value_end, *tags.value_stops)
        self.json_words = tuple(word.partition('"')[0] for word in self.words)
        """The part of each word that can occur inside a JSON string. A quote ends it."""
        self.start = tags.value_end[0]

    def parameters(self, schema: Mapping[str, Any]) -> Format:
        inside = members(schema)
        parts = []
        for name, inner, is_required in inside.properties:
            if not KEY.fullmatch(name) or name.strip() != name or not name:
                refuse(f"the property name {name!r}")
            part = self.parameter(name, inner, schema)
            parts.append(part if is_required else optional(part))
        if inside.values is not None:
            parts.append(repeated(self.parameter(None, inside.values, schema)))
        return sequence(*parts)

    def parameter(self, name: str | None, schema: Any, root: Mapping[str, Any]) -> Format:
        """Return the format of a parameter. name: None = any name; the parser then decides the
        types."""
        tags = self.tags
        types = STRING if name is None else parameter_types(root, name)
        string, other = self.value(schema, root, types)
        by_end = [(string, tags.key_end), (other, tags.key_end)]
        if tags.string_key_ends:
            by_end = [(string, tags.string_key_ends[0]), (other, tags.json_key_ends[0])]
        elif string is not None and other is not None:
            by_end = [(either(string, other), tags.key_end)]
        key = regex(NEW_KEY) if name is None else text(name)
        behind = text(f"{tags.pad}{tags.value_end}{tags.line}")
        before = f"{tags.line}{tags.value_start}" if tags.value_start else ""
        choices = [
            sequence(text(f"{end}{before}{tags.pad}"), value, behind)
            for value, end in by_end
            if value is not None
        ]
        if not choices:
            refuse(
                f"{name!r} has no value that is plain text"
                if name
                else "unnamed properties that are not strings"
            )
        return sequence(text(tags.key_start), key, either(*choices))

    def value(
        self, schema: Any, root: Mapping[str, Any], types: frozenset[str]
    ) -> tuple[Format | None, Format | None]:
        """Return the patterns for a string and for all other types, each None if the schema allows
        none. Text that the parser reads as another type must also fit the schema, so other types
        next to strings must have no limits.
        """
        is_marked = bool(self.tags.string_key_ends)
        case = cases(schema, root)
        any_value = [part for part in case.schemas if not part]
        strings = [part for part in case.schemas if part.get("type") == "string"] or any_value
        others = [part for part in case.schemas if part.get("type", "string") != "string"]
        if is_marked and any_value:
            others = any_value
        elif types == STRING:
            others = []
        unlimited = {part["type"] for part in others if len(part) == 1}
        limited = types - {"string"} - unlimited - ({"integer"} if "number" in unlimited else set())
        if strings and not is_marked:
            if limited:
                refuse(f"{min(limited)} with limits next to strings")
            if any(len(part) < 2 for part in strings):
                return self.string({}), None  # all text of the other types is also a string
            if not unlimited <= set(PLAIN):
                refuse("lists and objects next to strings with limits")
        texts = [self.string(part) for part in strings]
        plain = [self.other(part, root) for part in others]
        for constant in case.constants:
            written = (
                constant if isinstance(constant, str) else json.dumps(constant, ensure_ascii=False)
            )
            if self._is_read_back(written, constant, types, is_marked):
                (texts if isinstance(constant, str) else plain).append(text(written))
        return either(*texts) if texts else None, either(*plain) if plain else None

    def string(self, schema: Mapping[str, Any]) -> Format:
        words = self.words
        if self.tags.trim != "nothing" and not self.tags.pad:
            words = (*words, "\n")  # only the parser knows whether a newline at an end counts
        return characters(
            schema,
            any_text(self.words),
            ANY_CHARACTER,
            words,
            words,
            self.start + ("\n" if "\n" in words else ""),
        )

    def other(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Format:
        kind = schema.get("type")
        if len(schema) == 1 and kind in PLAIN:
            return regex(PLAIN[kind])
        has_strings = kind in (None, "object", "array")
        return json_value(self_contained(schema, root), self.json_words if has_strings else ())

    def _is_read_back(
        self, written: str, constant: Any, types: frozenset[str], is_marked: bool
    ) -> bool:
        if any(
            word in written
            for word in (self.words if isinstance(constant, str) else self.json_words)
        ):
            return False
        if self.tags.trim != "nothing" and not self.tags.pad and written.strip("\n") != written:
            return False
        if is_marked or types == STRING:
            return is_marked or isinstance(constant, str)
        read = json.loads(coerce(written, types))
        return bool(read == constant) and isinstance(read, bool) == isinstance(constant, bool)
