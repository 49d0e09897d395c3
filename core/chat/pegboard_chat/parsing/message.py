"""Folds the events of a message into the whole message, so that streamed and whole answers cannot
differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from pegboard.interfaces.output_parser import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass(slots=True)
class ToolCall:
    """arguments: JSON text. is_complete: whether the end of the call was read."""

    id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass(slots=True)
class Message:
    """A whole message. content and reasoning are "" if there was none."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def fold(events: Iterable[Event]) -> Message:
    """Folds events, in order, into a message. Tool calls are numbered from 0 in the order of their
    starts."""
    message = Message()
    for event in events:
        match event:
            case Content(text):
                message.content += text
            case Reasoning(text):
                message.reasoning += text
            case ToolCallStart(index, id, name):
                assert index == len(message.tool_calls), "tool calls start in order"
                message.tool_calls.append(ToolCall(id, name))
            case ToolCallArguments(index, text):
                message.tool_calls[index].arguments += text
            case ToolCallEnd(index):
                message.tool_calls[index].is_complete = True
    return message


def merged(events: Sequence[Event]) -> list[Event]:
    """Return the same events, with adjacent events that continue each other joined, and without
    those whose text is empty."""
    runs: list[tuple[Event, list[str]]] = []
    for event in events:
        if not isinstance(event, Content | Reasoning | ToolCallArguments):
            runs.append((event, []))
        elif event.text and runs and type(event) is type(runs[-1][0]):
            runs[-1][1].append(event.text)
        elif event.text:
            runs.append((event, [event.text]))
    return [
        replace(event, text="".join(texts))
        if isinstance(event, Content | Reasoning | ToolCallArguments) and len(texts) > 1
        else event
        for event, texts in runs
    ]
