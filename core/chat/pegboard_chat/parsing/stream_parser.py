"""Output parsers written as one generator, and the numbering of tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.output_parser import (
    Content,
    Event,
    OutputParserSetup,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing.markers import Markers
from pegboard_chat.parsing.message import merged
from pegboard_chat.parsing.reader import Steps, TextReader


class Calls:
    """Makes the events of tool calls and numbers them. tools: the request's tools, in OpenAI's form."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.count = 0
        self.is_open = False
        self._tools = tools
        self._ids: set[str] = set()

    def start(self, name: str, id: str | None = None) -> Event:
        """Begin a call. id: the id that the model wrote. A random id is used if there is none or the model has already used
        it."""
        assert not self.is_open, "one call at a time"
        self.count, self.is_open = self.count + 1, True
        if not id or id in self._ids:
            id = self.fresh_id(self.count - 1, name)
        self._ids.add(id)
        return ToolCallStart(self.count - 1, id, name)

    def fresh_id(self, index: int, name: str) -> str:
        """Return the id of a call whose text has none. Override it if the model's chat template requires other ids."""
        return f"chatcmpl-tool-{uuid.uuid4().hex}"

    def arguments(self, text: str) -> Event:
        """Add JSON text to the open call's arguments."""
        return ToolCallArguments(self.count - 1, text)

    def end(self) -> Event:
        """End the open call, which is complete."""
        self.is_open = False
        return ToolCallEnd(self.count - 1)

    def abandon(self) -> None:
        """Leave the open call, which was broken off. It has no end in the stream, and the next call gets the next number."""
        self.is_open = False

    def whole(self, name: str, arguments: str, id: str | None = None) -> list[Event]:
        """Make a complete call at once."""
        return [self.start(name, id), self.arguments(arguments), self.end()]

    def parameters(self, name: str) -> Mapping[str, Any]:
        """Return the JSON schema of the arguments of tool `name`, or {} if the request has no such tool."""
        for tool in self._tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and function.get("name") == name:
                found = function.get("parameters")
                return found if isinstance(found, Mapping) else {}
        return {}


class StreamParser:
    """An output parser. A subclass must define only `read`. self.text: the text, a `TextReader`. self.calls: makes the events of
    tool calls. self.setup: the setup, which may be None in tests.
    """

    def __init__(self, options: object = None, setup: OutputParserSetup | None = None) -> None:
        self.options = options
        self.setup = setup
        self.text = TextReader()
        self.calls = Calls(setup.tools if setup else ())
        self._steps: Steps[None] = self._read_all()

    def read(self) -> Steps[None]:
        """Read the whole completion. Text that it does not read becomes content."""
        raise AssertionError(f"{type(self).__name__} overrides read")

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        self.text.append(text)
        return self._run()

    def finish(self) -> list[Event]:
        self.text.close()
        return self._run()

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        return None

    def reasoning_end(self) -> tuple[str, ...]:
        return ()

    def call_id(self, index: int, name: str) -> str:
        return self.calls.fresh_id(index, name)

    def prose(self, markers: Markers) -> Steps[str]:
        """Stream content up to the next marker and return the marker, or "" if the text has ended. White space between calls is
        dropped."""
        return (yield from self.text.prose(markers, keep_space=not self.calls.count))

    def attempt(self, call: Steps[bool]) -> Steps[bool]:
        """Read what seems to be a call (the marker before it is kept by `prose`). If it returns False, the text that it consumed
        without turning it into events becomes content, and reading continues after it."""
        is_good = yield from call
        if is_good:
            self.text.forget()
        else:
            self.calls.abandon()
            yield from self.text.give_back()
        return is_good

    def _run(self) -> list[Event]:
        events: list[Event] = []
        for event in self._steps:
            if event is None:
                break
            events.append(event)
        return merged(events)

    def _read_all(self) -> Steps[None]:
        yield from self.read()
        while True:
            text, place = self.text.window()
            if rest := self.text.take(len(text) - place):
                yield Content(rest)
            if self.text.is_closed:
                return
            yield None
