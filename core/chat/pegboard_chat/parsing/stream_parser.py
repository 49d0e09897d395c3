"""Output parsers written as one generator, and the numbering of tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

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
    """Makes the events of tool calls and numbers them. tools: the request's tools, in OpenAI's
    form."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.count = 0
        self.is_open = False
        self._tools = tools
        self._ids: set[str] = set()

    def start(self, name: str, id: str | None = None) -> Event:
        """Begin a call. id: the id that the model wrote. A random id is used if there is none or
        the model has already used it."""
        assert not self.is_open, "one call at a time"
        self.count = self.count + 1
        self.is_open = True
        if not id or id in self._ids:
            id = self.fresh_id(self.count - 1, name)
        self._ids.add(id)
        return ToolCallStart(self.count - 1, id, name)

    def fresh_id(self, index: int, name: str) -> str:
        """Return the id of a call whose text has none. Override it if the model's chat template
        requires other ids."""
        return f"chatcmpl-tool-{uuid.uuid4().hex}"

    def arguments(self, text: str) -> Event:
        """Add JSON text to the open call's arguments."""
        return ToolCallArguments(self.count - 1, text)

    def end(self) -> Event:
        """End the open call, which is complete."""
        self.is_open = False
        return ToolCallEnd(self.count - 1)

    def abandon(self) -> None:
        """Leave the open call, which was broken off. It has no end in the stream, and the next call
        gets the next number."""
        self.is_open = False

    def whole(self, name: str, arguments: str, id: str | None = None) -> list[Event]:
        """Make a complete call at once."""
        return [self.start(name, id), self.arguments(arguments), self.end()]

    def stream(
        self,
        text: TextReader,
        steps: Steps[str | None],
        held: list[str],
        name: str,
        id: str | None = None,
    ) -> Steps[str | None]:
        """Make the content that `steps` yields into arguments of call `name`, which begins with the
        first of them if it is not open. Return what `steps` returns: None after a whole value, or
        the text that would close a broken one. If the text ends inside the value, what `steps` has
        `held` back belongs to the arguments too."""
        while True:
            try:
                event = next(steps)
            except StopIteration as end:
                closing: str | None = end.value
                break
            if event is None:
                yield None
                continue
            assert isinstance(event, Content)
            if not self.is_open:
                yield self.start(name, id)
            yield self.arguments(event.text)
            text.keep()
        if closing is not None and text.is_at_end():
            if not self.is_open:
                yield self.start(name, id)
            if rest := "".join(held):
                yield self.arguments(rest)
            text.forget()
        return closing

    def tool_names(self) -> list[str]:
        """Return the names of the request's tools."""
        return [function["name"] for function in self._functions()]

    def parameters(self, name: str) -> Mapping[str, Any]:
        """Return the JSON schema of the arguments of tool `name`, or {} if the request has no such
        tool."""
        schema = next(
            (each.get("parameters") for each in self._functions() if each["name"] == name), None
        )
        return schema if isinstance(schema, Mapping) else {}

    def _functions(self) -> Iterator[Mapping[str, Any]]:
        functions = (tool.get("function", tool) for tool in self._tools)
        return (
            function
            for function in functions
            if isinstance(function, Mapping) and "name" in function
        )


class StreamParser:
    """An output parser. A subclass must define only `read`. self.text: the text, a `TextReader`.
    self.calls: makes the events of tool calls. self.setup: the setup, which may be None in tests.

    ends: the format's control texts that begin nothing, such as end tags. `prose` drops them,
    except in text that was given back because it is not a call. thoughts: beginning → end of
    reasoning. `prose` passes it on as content, and nothing in it is a call (a reasoning parser, if
    there is one, has already removed it).
    """

    ends: ClassVar[tuple[str, ...]] = ()
    thoughts: ClassVar[Mapping[str, str]] = {"<think>": "</think>"}

    def __init__(self, options: object = None, setup: OutputParserSetup | None = None) -> None:
        self.options = options
        self.setup = setup
        self.text = TextReader()
        self.calls = Calls(setup.tools if setup else ())
        self._is_begun = False
        self._given_back = ""
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
        """Stream content up to the next marker and return the marker, or "" if the text has ended.
        White space between calls is dropped, and so are `ends` and all tags but one if the same tag
        is repeated."""
        yield from self.prompted_thought()
        wanted = _together(markers, (*self.thoughts, *self.ends))
        while True:
            marker = yield from self.text.prose(wanted, keep_space=not self.calls.count)
            if marker in self.thoughts:
                yield from self.text.give_back()
                yield from self.thought(marker)
            elif marker in markers.texts or not marker:
                if len(marker) > 1 and marker[0] in "<[":  # a tag, and not a word or a bracket
                    yield from self.text.space()
                    while (yield from self.text.accept(marker)):
                        yield from self.text.space()
                return marker
            elif self._is_text(marker):
                yield from self.text.give_back()
            else:
                self.text.forget()

    def prompted_thought(self) -> Steps[None]:
        """Stream the reasoning that the prompt has begun, as content. `prose` does so itself."""
        prompt = self.setup.prompt_end.rstrip() if self.setup and not self._is_begun else ""
        self._is_begun = True
        for start in self.thoughts:
            if prompt.endswith(start):
                yield from self.thought(start)

    def attempt(self, call: Steps[bool]) -> Steps[bool]:
        """Read what seems to be a call (the marker before it is kept by `prose`). If it returns
        False, the text that it consumed without turning it into events becomes content, and reading
        continues after it."""
        count = self.calls.count
        given: list[Event] = []
        is_good = yield from call
        if is_good:
            self.text.forget()
        else:
            self.calls.abandon()
            yield from (given := self.text.give_back())
            if self.calls.count == count:
                self._given_back = given[0].text if given and isinstance(given[0], Content) else " "
        if self.calls.count > count:
            self._given_back = ""
            if not given:
                self.text.end_call()
        return is_good

    def _is_text(self, end: str) -> bool:
        """Return whether one of `ends`, which was consumed last, belongs to text that was given
        back, or is quoted."""
        if not end.startswith("</"):
            return "<" in self._given_back or "[" in self._given_back
        return f"<{end[2:]}" in self._given_back or self.text.is_quoted(end)

    def thought(self, start: str) -> Steps[None]:
        """Stream reasoning, whose beginning is already content, up to its end."""
        end = yield from self.text.pieces(Markers(self.thoughts[start]), Content)
        if end:
            yield Content(end)

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


@lru_cache(maxsize=256)
def _together(markers: Markers, others: tuple[str, ...]) -> Markers:
    return Markers(*dict.fromkeys((*markers.texts, *others)))
