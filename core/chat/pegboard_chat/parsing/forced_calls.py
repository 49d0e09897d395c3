"""Calls that the request forces. The model does not use its own format but writes JSON that follows
a schema made from the tools.

Required: [{"name": …, "parameters": {…}}, …]. Named: the arguments of the one function. Both are
vLLM's forms.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any
from uuid import uuid4

from pegboard.errors import RequestError
from pegboard.interfaces.output_parser import (
    Content,
    Event,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from pegboard.interfaces.structured_output import Constraint

SPACES = " \t\r\n"
STRING = re.compile(r'[^"\\]*')
VALUE = re.compile(r'[^"{}\[\]]*')


def named_schema(tools: Sequence[Mapping[str, Any]], function: str) -> dict[str, Any]:
    """Return the JSON schema of the arguments of `function`. Raises RequestError if it is not one
    of the tools."""
    for tool in tools:
        if tool["function"]["name"] == function:
            return _parameters(tool)
    names = ", ".join(tool["function"]["name"] for tool in tools) or "none"
    raise RequestError(
        f"tool_choice names {function!r}, which is not among the tools ({names})",
        parameter="tool_choice",
    )


def required_schema(
    tools: Sequence[Mapping[str, Any]], *, is_parallel: bool = True
) -> dict[str, Any]:
    """Return the JSON schema of a list of calls. The list has at least one call, and only one
    unless `is_parallel`."""
    definitions: dict[str, Any] = {}
    items = []
    for tool in tools:
        name = tool["function"]["name"]
        parameters = dict(_parameters(tool))
        parameter_definitions = parameters.pop("$defs", {})
        if not isinstance(parameter_definitions, Mapping):
            raise RequestError(
                f"the parameters of {name!r} are not a JSON schema: $defs must be an object",
                parameter="tools",
            )
        for key, definition in parameter_definitions.items():
            if definitions.setdefault(key, definition) != definition:
                raise RequestError(
                    f"two tools define '#/$defs/{key}' differently; rename one of them",
                    parameter="tools",
                )
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": parameters}
        closed = {
            "type": "object",
            "properties": properties,
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        items.append(closed)
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    if not is_parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a tool's schema. A tool without a schema takes an empty object."""
    schema = tool["function"].get("parameters")
    return copy.deepcopy(dict(schema)) if schema else {"type": "object", "properties": {}}


MakeId = Callable[[int, str], str]
"""(index, name of the function) → id of a call."""


def fresh_id(index: int, name: str) -> str:
    """Return the id of a call whose format has no ids, in vLLM's form."""
    return f"chatcmpl-tool-{uuid4().hex}"


class NamedCall:
    """Reads the whole text as the arguments of one function. Spaces around them are dropped."""

    def __init__(self, function: str, make_id: MakeId = fresh_id) -> None:
        self._function = function
        self._make_id = make_id
        self._has_begun = False
        self._spaces = ""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        events: list[Event] = []
        if not self._has_begun:
            text = text.lstrip(SPACES)
            if not text:
                return []
            self._has_begun = True
            events.append(ToolCallStart(0, self.call_id(0, self._function), self._function))
        text = self._spaces + text
        body = text.rstrip(SPACES)
        self._spaces = text[len(body) :]
        if body:
            events.append(ToolCallArguments(0, body))
        return events

    def finish(self) -> list[Event]:
        return [ToolCallEnd(0)] if self._has_begun else []

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        return Constraint("json", json.dumps(named_schema(tools, self._function)))

    def reasoning_end(self) -> tuple[str, ...]:
        return ()

    def call_id(self, index: int, name: str) -> str:
        return self._make_id(index, name)


class RequiredCalls:
    """Reads the list of calls. Arguments stream once the name is known. Text that is not such a
    list becomes content.

    It makes one pass over the text. `_depth` counts open brackets (1 = the list, 2 = a call, more =
    inside a value).
    """

    def __init__(self, make_id: MakeId = fresh_id) -> None:
        self._make_id = make_id
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_content = False
        self._is_done = False
        self._count = 0
        self._head: list[str] = []  # the text before the first call
        self._call = _Call(0, make_id)

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        events: list[Event] = []
        place = 0
        while place < len(text):
            if self._is_content:
                events.append(Content(text[place:]))
                break
            if (end := self._plain(text, place)) > place:
                self._call.add(text[place:end], events)
                place = end
                continue
            if self._depth >= 2:
                self._inside(text[place], events)
            else:
                self._outside(text[place], events)
            place += 1
        return _joined(events)

    def _plain(self, text: str, place: int) -> int:
        """Return the end of the characters from `place` on that do not change the state, either
        inside a string, or inside a value but outside strings."""
        if self._is_escaped or not (self._in_string or self._depth > 2):
            return place
        match = (STRING if self._in_string else VALUE).match(text, place)
        assert match is not None, "the pattern also matches the empty text"
        return match.end()

    def finish(self) -> list[Event]:
        """End the text. A call that is cut off stays open. A call without a name and a list without
        calls become content."""
        unread = self._head if not self._count else []
        if self._depth >= 2:
            unread = [] if self._call.is_started else [*unread, *self._call.text]
        return [Content("".join(unread))] if unread and not self._is_content else []

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        return Constraint("json", json.dumps(required_schema(tools)))

    def reasoning_end(self) -> tuple[str, ...]:
        return ()

    def call_id(self, index: int, name: str) -> str:
        return self._make_id(index, name)

    def _outside(self, character: str, events: list[Event]) -> None:
        if self._depth == 1 and character == "{":
            self._depth = 2
            self._call = _Call(self._count, self._make_id)
            self._call.text.append(character)
            return
        if not self._count:
            self._head.append(character)
        if character in SPACES or (self._depth == 1 and character == "," and self._count):
            return
        if character == "[" and self._depth == 0 and not self._is_done:
            self._depth = 1
        elif character == "]" and self._depth == 1:
            self._depth = 0
            self._is_done = True
        else:
            self._is_content = True
            events.append(Content(character if self._count else "".join(self._head)))

    def _inside(self, character: str, events: list[Event]) -> None:
        call = self._call
        # directly in the call, not inside one of its values
        is_between = self._depth == 2 and not self._in_string
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            else:
                self._in_string = character != '"'
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        if self._depth == 1:
            self._end_call(events)
        elif is_between and character in ":,":
            call.separate(character, events)
        elif is_between and character in SPACES:
            call.skip(character)
        else:
            call.add(character, events)

    def _end_call(self, events: list[Event]) -> None:
        call = self._call
        call.skip("}")
        call.close_value(events)
        if call.is_started:
            if not call.has_arguments:
                events.append(ToolCallArguments(self._count, "{}"))
            events.append(ToolCallEnd(self._count))
            self._count += 1
        else:  # an object that is not a call, so this is not a list of calls
            self._is_content = True
            events.append(Content("".join([*(self._head if not self._count else ()), *call.text])))


class _Call:
    """Reads one object of the list, whose members may be in any order. text: its whole text, until
    the call has started."""

    def __init__(self, index: int, make_id: MakeId) -> None:
        self._make_id = make_id
        self.text: list[str] = []
        self.is_started = False
        self.has_arguments = False
        self._index = index
        self._key: str | None = None
        self._part: list[str] = []
        self._early_arguments: list[str] = []

    def skip(self, text: str) -> None:
        """Handle text that belongs to no member."""
        if not self.is_started:
            self.text.append(text)

    def add(self, text: str, events: list[Event]) -> None:
        """Add text to the key or value that is being read."""
        self.skip(text)
        if self._key in ("parameters", "arguments"):
            self.has_arguments = True
            if self.is_started:
                events.append(ToolCallArguments(self._index, text))
            else:
                self._early_arguments.append(text)
        else:
            self._part.append(text)

    def separate(self, character: str, events: list[Event]) -> None:
        """Handle a colon, which ends a key, or a comma, which ends a value."""
        self.skip(character)
        if character == ":" and self._key is None:
            self._key = str(_value(self._part))
            self._part = []
        elif character == ",":
            self.close_value(events)

    def close_value(self, events: list[Event]) -> None:
        """End the current member. The name starts the call."""
        if self._key == "name" and not self.is_started:
            self.is_started = True
            name = str(_value(self._part))
            events.append(ToolCallStart(self._index, self._make_id(self._index, name), name))
            if self._early_arguments:
                events.append(ToolCallArguments(self._index, "".join(self._early_arguments)))
        self._key = None
        self._part = []


def _value(characters: Sequence[str]) -> Any:
    text = "".join(characters)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _joined(events: list[Event]) -> list[Event]:
    """Join adjacent argument pieces of one call."""
    joined: list[Event] = []
    for is_arguments, group in groupby(events, lambda event: isinstance(event, ToolCallArguments)):
        if is_arguments:
            pieces = list(group)
            joined.append(
                ToolCallArguments(pieces[0].index, "".join(piece.text for piece in pieces))
            )  # type: ignore[union-attr]
        else:
            joined += group
    return joined
