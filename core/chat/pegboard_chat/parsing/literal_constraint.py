"""Strict values in notations other than JSON: Python's literals, and notations with their own
words, quotes and keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing.schema_cases import MAX_DEPTH, cases, characters, members, refuse
from pegboard_chat.parsing.structural_tag import (
    ANY_CHARACTER,
    IDENTIFIER,
    Format,
    any_text,
    constraint,
    diverging,
    either,
    json_value,
    listed,
    optional,
    regex,
    repeated,
    sequence,
    text,
    triggered,
)

Schema = Mapping[str, Any]

NAME = "[A-Za-z_][A-Za-z0-9_]*"
"""The pattern of an argument that no schema names."""
HEX = "[0-9a-fA-F]"
ESCAPES = rf"\\[\\nrtbf\"']|\\u[0-9a-cefA-CEF]{HEX}{HEX}{HEX}|\\u[dD][0-7]{HEX}{HEX}"
"""Text that Python and JSON read in the same way. The pattern has no groups and no counts, because
with these xgrammar's masks take a thousand times as long."""
SPACES = r" \t\n\r\x0b\f\x1c-\x1f" + "".join(
    c for c in map(chr, range(0x80, 0x3001)) if c.isspace()
)
"""The white space that parsers skip, as the inside of a character class."""


@dataclass(frozen=True)
class Notation:
    """How values are written where that differs from JSON. string(schema): the format of a string
    that follows its schema. constant(text): the format of one string. key(name): the format of a
    property's name; None = any name. words: how true, false and null are written. has_json: lists
    and objects may be JSON, and those without a schema must be.
    """

    string: Callable[[Schema], Format]
    constant: Callable[[str], Format]
    key: Callable[[str | None], Format]
    words: Mapping[str, Sequence[str]]
    colon: str = ": ?"
    comma: str = ", ?"
    has_json: bool = True

    @classmethod
    def between(cls, quote: str, key: re.Pattern[str]) -> Notation:
        """Return a notation with strings between two `quote`s without escapes, names that are bare
        if they match `key`, and the words of JSON."""

        def string(schema: Schema) -> Format:
            inside = characters(
                schema, any_text([quote]), ANY_CHARACTER, [quote], [quote], quote[0]
            )
            return sequence(text(quote), inside, text(quote))

        def constant(value: str) -> Format:
            if quote in value:
                refuse(f"a constant with {quote}")
            return text(f"{quote}{value}{quote}")

        def name_of(name: str | None) -> Format:
            return (
                regex(NAME)
                if name is None
                else text(name)
                if key.fullmatch(name)
                else constant(name)
            )

        words = {"true": ("true",), "false": ("false",), "null": ("null",)}
        return cls(string, constant, name_of, words, colon=":", comma=",", has_json=False)

    def value(self, schema: Any, root: Schema, depth: int = 0) -> Format:
        """Return the format of a value that follows the schema. root: the schema that its
        references point into. Raises RequestError for what cannot be enforced."""
        if depth > MAX_DEPTH:
            refuse("it refers to itself")
        case = cases(schema, root)
        ways = [self._constant(constant) for constant in case.constants]
        ways += [self._typed(part, root, depth) for part in case.schemas]
        if not ways:
            refuse("a schema that no value fits")
        return either(*ways)

    def object(self, schema: Schema, root: Schema, depth: int = 0) -> Format:
        """Return the format of a whole object, from brace to brace."""
        inside = members(schema)
        colon = regex(self.colon)
        comma = regex(self.comma)
        if inside.values is not None:
            entry = sequence(self.key(None), colon, self.value(inside.values, root, depth + 1))
            parts = sequence(entry, repeated(sequence(comma, entry)))
            return sequence(text("{"), optional(parts), text("}"))
        entries = [
            (sequence(self.key(name), colon, self.value(inner, root, depth + 1)), is_required)
            for name, inner, is_required in inside.properties
        ]
        return sequence(text("{"), listed(entries, comma), text("}"))

    def _typed(self, schema: Schema, root: Schema, depth: int) -> Format:
        kind = schema.get("type")
        if kind == "string":
            return self.string(schema)
        if kind in ("integer", "number"):
            return json_value(schema)
        if kind == "boolean":
            return regex("|".join([*self.words["true"], *self.words["false"]]))
        if kind == "null":
            return regex("|".join(self.words["null"]))
        if kind == "array":
            return self._array(schema, root, depth)
        if kind == "object" and (not self.has_json or len(schema) > 1):
            return self.object(schema, root, depth)
        if not self.has_json:
            refuse("a value of any type")
        if kind == "object":
            return json_value(schema)
        plain = [self._typed({"type": name}, root, depth) for name in ("string", "boolean", "null")]
        return either(*plain, json_value({"type": ["number", "array", "object"]}))

    def _array(self, schema: Schema, root: Schema, depth: int) -> Format:
        if further := set(schema) - {"type", "items", "minItems", "maxItems"}:
            refuse(", ".join(sorted(further)))
        least = schema.get("minItems", 0)
        most = schema.get("maxItems", -1)
        item = self.value(schema.get("items", True), root, depth + 1)
        if most == 0:
            return text("[]")
        following = sequence(regex(self.comma), item)
        rest = repeated(following, max(0, least - 1), most - 1 if most > 0 else -1)
        items = sequence(item, rest) if most != 1 else item
        return sequence(text("["), items if least else optional(items), text("]"))

    def _constant(self, value: Any) -> Format:
        if value is None or isinstance(value, bool):
            return regex("|".join(self.words[json.dumps(value)]))
        if isinstance(value, str):
            return self.constant(value)
        if isinstance(value, int | float):
            return text(json.dumps(value))
        refuse("constants that are lists or objects")


def _quoted_string(schema: Schema) -> Format:
    """Return the format of a string. Strings with limits contain only characters that need no
    escape."""
    ways = []
    for quote in "\"'":
        plain = rf"[^\\{quote}\x00-\x1f]"
        forbidden = [quote, "\\", "\n"]
        inside = characters(
            schema, regex(f"(?:{plain}|{ESCAPES})*"), plain, (), forbidden, "".join(forbidden)
        )
        ways.append(sequence(text(quote), inside, text(quote)))
    return either(*ways)


def _quoted_constant(value: str) -> Format:
    written = json.dumps(value, ensure_ascii=False)[1:-1]
    ways = [text(f'"{written}"')]
    if "'" not in value:
        single = written.replace('\\"', '"')
        ways.append(text(f"'{single}'"))
    return either(*ways)


def _quoted_key(name: str | None) -> Format:
    if name is not None:
        return _quoted_constant(name)
    return regex(rf'"(?:[^\\"\x00-\x1f]|{ESCAPES})*"')


PYTHON = Notation(
    string=_quoted_string,
    constant=_quoted_constant,
    key=_quoted_key,
    words={"true": ("True", "true"), "false": ("False", "false"), "null": ("None", "null")},
)
"""Return a notation of Python literals; the words of JSON are also allowed. Strings contain control
characters only as escapes."""


def python_call(tool: Mapping[str, Any]) -> Format:
    """Return the format `name(key=value, …)` of one tool. The arguments are in the order of its
    schema. A tool that is not `strict` may have any arguments."""
    function = tool["function"]
    schema = function.get("parameters") if function.get("strict") else None
    keys: list[tuple[Format, bool]] = []
    equals = text("=")
    begin = text(f"{function['name']}(")
    inside = members(schema) if schema else None
    if inside is not None and inside.values is None:
        assert schema is not None
        for name, inner, is_required in inside.properties:
            if not IDENTIFIER.fullmatch(name):
                refuse(f"the argument name {name!r}")
            keys.append((sequence(text(name), equals, PYTHON.value(inner, schema)), is_required))
        return sequence(begin, listed(keys, regex(PYTHON.comma)), text(")"))
    values = inside.values if inside is not None else True
    entry = sequence(regex(NAME), equals, PYTHON.value(values, schema or {}))
    return sequence(
        begin, optional(sequence(entry, repeated(sequence(regex(PYTHON.comma), entry)))), text(")")
    )


def constrained_objects(
    tools: Sequence[Mapping[str, Any]], notation: Notation, trigger: str, before: str, end: str
) -> Constraint | None:
    """Return a structural tag in which a call must follow a trigger. None: no tools were given. A
    call is `before`, the tool's name and an object in the notation. All other text is free. The
    arguments of a tool that is not `strict` are any text."""
    objects = []
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") if function.get("strict") else None
        body = (
            notation.object(schema, schema)
            if schema
            else sequence(text("{"), any_text([end]), text("}"))
        )
        objects.append((f"{trigger}{before}{function['name']}", body, end))
    return constraint(triggered([trigger], objects)) if objects else None


def constrained_python_lines(
    tools: Sequence[Mapping[str, Any]], begin: str, end: str
) -> Constraint | None:
    """Return a structural tag with calls, one per line, between the tags `begin` and `end`. None:
    no tools were given. All other text is free."""
    if not tools:
        return None
    calls = repeated(sequence(text("\n"), either(*map(python_call, tools))), 1)
    return constraint(triggered([begin], [(begin, calls, f"\n{end}")]))


def constrained_python_lists(
    tools: Sequence[Mapping[str, Any]], begin: str = "", end: str = ""
) -> Constraint | None:
    """Return a structural tag in which an output that begins with a bracket is a list of calls,
    `[f(a=1), g()]`, and nothing else. None: no tools were given. Other outputs are free. begin,
    end: tags around a list of calls, which may then be anywhere.
    """
    if not tools:
        return None
    call = either(*map(python_call, tools))
    calls = sequence(
        regex(f"[{SPACES}]*"),
        text("["),
        call,
        repeated(sequence(regex(PYTHON.comma), call)),
        text("]"),
    )
    if not begin:
        return constraint(either(calls, regex(rf"(?:[{SPACES}]*[^\[{SPACES}][\s\S]*)?")))
    free = triggered([begin], [(begin, calls, end)])
    first = sequence(
        regex(f"[{SPACES}]*"),
        either(regex(diverging([begin], rf"\[{SPACES}")), sequence(text(begin), calls, text(end))),
    )
    return constraint(either(calls, optional(sequence(first, free))))
