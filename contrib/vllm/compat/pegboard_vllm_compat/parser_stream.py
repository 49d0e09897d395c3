"""From the DeltaMessages of vLLM's streaming methods to Pegboard's events, and what a stream still
lacks when the whole answer is known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pegboard.interfaces.output_parser import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from pegboard_vllm_compat.protocol import random_tool_call_id


@dataclass(slots=True)
class Call:
    """One call, as far as it is known. arguments: JSON text, perhaps a part of it."""

    name: str
    arguments: str = ""


class Answer:
    """The sum of events. reasoning, content: joined text. calls: in order."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.reasoning = ""
        self.content = ""
        self.calls: list[Call] = []
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Add one event."""
        if isinstance(event, Reasoning):
            self.reasoning += event.text
        elif isinstance(event, Content):
            self.content += event.text
        elif isinstance(event, ToolCallStart):
            self.calls.append(Call(event.name))
        elif isinstance(event, ToolCallArguments):
            self.calls[event.index].arguments += event.text


class DeltaReader:
    """Makes events of the DeltaMessages of one answer. sent: what the events say so far."""

    def __init__(self) -> None:
        self.sent = Answer()
        self._places: dict[int, int] = {}
        self._is_open = False

    def read(self, delta: Any) -> list[Event]:
        """Return the events of a DeltaMessage, or of None. Raises ValueError for a call that goes
        on after the next one has begun, or that has no name."""
        if delta is None:
            return []
        events: list[Event] = []
        if reasoning := delta.reasoning or delta.reasoning_content:
            events.append(Reasoning(reasoning))
        if delta.content:
            events.append(Content(delta.content))
        self._add(events)
        for part in delta.tool_calls or ():
            opened = self._part(part)
            self._add(opened)
            events += opened
        return events

    def _part(self, part: Any) -> list[Event]:
        """Return the events of a DeltaToolCall."""
        name = part.function.name if part.function else None
        text = part.function.arguments if part.function else None
        events: list[Event] = []
        if part.index not in self._places and name:
            place = self._places[part.index] = len(self.sent.calls)
            events += [*self.end(), ToolCallStart(place, part.id or random_tool_call_id(), name)]
            self._is_open = True
        elif text and self._places.get(part.index) != len(self.sent.calls) - 1:
            raise ValueError(f"arguments of call {part.index}, which is not the open one")
        if text:
            events.append(ToolCallArguments(self._places[part.index], text))
        return events

    def _add(self, events: Iterable[Event]) -> None:
        for event in events:
            self.sent.add(event)

    def end(self) -> list[Event]:
        """Return the end of the open call, if there is one."""
        events: list[Event] = [ToolCallEnd(len(self.sent.calls) - 1)] if self._is_open else []
        self._is_open = False
        return events

    def rest(self, whole: list[Event]) -> list[Event] | None:
        """Return the events that are missing for the whole answer, or None if the stream has said
        something else."""
        answer = Answer(whole)
        reasoning = tail(self.sent.reasoning, answer.reasoning)
        content = tail(self.sent.content, answer.content)
        if not self.sent.calls:
            if reasoning is None or content is None:
                return None
            texts: list[Event] = [Reasoning(reasoning)] if reasoning else []
            texts += [Content(content)] if content else []
            return texts + [one for one in whole if not isinstance(one, Reasoning | Content)]
        count = len(self.sent.calls)
        pairs = list(zip(self.sent.calls, answer.calls, strict=False))
        tails = [argument_tail(mine.arguments, other.arguments) for mine, other in pairs]
        if (
            len(pairs) < count
            or any(mine.name != other.name for mine, other in pairs)
            or any(tails[:-1])
            or None in (reasoning, content, *tails)
        ):
            return None
        events: list[Event] = [Reasoning(reasoning)] if reasoning else []
        if tails[-1]:
            events.append(ToolCallArguments(count - 1, tails[-1]))
        events += self.end()
        events += [
            one for one in whole if not isinstance(one, Reasoning | Content) and one.index >= count
        ]
        return events + ([Content(content)] if content else [])


def tail(sent: str, whole: str) -> str | None:
    """Return what follows `sent` in `whole`, or None if `whole` does not begin with it. White space
    around a text makes no difference."""
    if whole.startswith(sent):
        return whole[len(sent) :]
    core = sent.strip()
    bare = whole.lstrip()
    return bare[len(core) :] if bare.startswith(core) else None


def argument_tail(sent: str, whole: str) -> str | None:
    """Return what follows `sent` in the arguments of a whole call, "" if both are the same JSON in
    another form, or None."""
    if whole.startswith(sent):
        return whole[len(sent) :]
    try:
        return "" if json.loads(sent) == json.loads(whole) else None
    except ValueError:
        return None
