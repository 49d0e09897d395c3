"""Fakes of the kinds `reasoning_parser` and `tool_parser`: real parsers of small formats.

<think> … </think>                 reasoning
<call name> {"x": 1} </call>       a tool call; its arguments are streamed as they arrive
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.output_parser import (
    Content,
    Event,
    OutputParserSetup,
    OutputParserSpec,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing import MarkerScanner

REASONING = OutputParserSpec(
    api="1.0", implementation="pegboard_testing.fake_parsers:FakeReasoningParser"
)
TOOLS = OutputParserSpec(api="1.0", implementation="pegboard_testing.fake_parsers:FakeToolParser")


class FakeReasoningParser:
    """Text between the markers is reasoning. The markers are dropped."""

    def __init__(self, options: None = None, setup: OutputParserSetup | None = None) -> None:
        self._scanner = MarkerScanner(["<think>", "</think>"])
        self._is_reasoning = False

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        events: list[Event] = []
        for piece, is_marker in self._scanner.scan(text):
            if is_marker:
                self._is_reasoning = piece == "<think>"
            else:
                events.append(self._event(piece))
        return events

    def finish(self) -> list[Event]:
        held = self._scanner.flush()
        return [self._event(held)] if held else []

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        return None

    def call_id(self, index: int, name: str) -> str:
        return f"call-{index}"

    def reasoning_end(self) -> tuple[str, ...]:
        return ("</think>",)

    def _event(self, text: str) -> Event:
        return Reasoning(text) if self._is_reasoning else Content(text)


class FakeToolParser:
    """Calls are numbered in order. A call whose name does not end becomes content. A call without
    an end stays open in the stream and is not complete."""

    def __init__(self, options: None = None, setup: OutputParserSetup | None = None) -> None:
        self._scanner = MarkerScanner(["<call "])
        self._name: str | None = None
        self._in_call = False
        self._count = 0

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        events: list[Event] = []
        for piece, is_marker in self._scanner.scan(text):
            events += self._step(piece, is_marker)
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        held = self._scanner.flush()
        if held:
            events += self._step(held, False)
        if self._name is not None:
            events.append(Content(f"<call {self._name}"))
            self._name = None
        return events

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        return None

    def call_id(self, index: int, name: str) -> str:
        return f"call-{index}"

    def reasoning_end(self) -> tuple[str, ...]:
        return ()

    def _step(self, piece: str, is_marker: bool) -> list[Event]:
        if self._name is not None:  # between "<call " and ">"
            if not is_marker:
                self._name += piece
                return []
            self._scanner.markers = ("</call>",)
            name = self._name
            self._name = None
            self._in_call = True
            return [ToolCallStart(self._count, f"call_{self._count}", name)]
        if self._in_call:
            if not is_marker:
                return [ToolCallArguments(self._count, piece)]
            self._scanner.markers = ("<call ",)
            self._in_call = False
            self._count = self._count + 1
            return [ToolCallEnd(self._count - 1)]
        if is_marker:
            self._scanner.markers = (">",)
            self._name = ""
            return []
        return [Content(piece)]
