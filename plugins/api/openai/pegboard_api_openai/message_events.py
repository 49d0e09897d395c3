"""From events to OpenAI's messages and deltas. The message is the fold of the events that the deltas carry one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pegboard.interfaces.output_parser import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from pegboard_chat.parsing import fold


def message_fields(events: Sequence[Event], *, echo: str, with_reasoning: bool) -> dict[str, Any]:
    """content, reasoning (under both of its names) and tool_calls of a whole message. content: null when the answer is only
    reasoning or calls."""
    message = fold(events)
    reasoning = message.reasoning if with_reasoning and message.reasoning else None
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    content: str | None = echo + message.content
    if not content and (calls or message.reasoning):
        content = None
    return {"content": content, "tool_calls": calls, "reasoning": reasoning, "reasoning_content": reasoning}


def delta_fields(events: Sequence[Event], *, with_reasoning: bool) -> dict[str, Any]:
    """What one output adds, as the fields of a delta; {} when it adds nothing that is shown."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallStart(index, id, name):
                calls[index] = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            case ToolCallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    delta: dict[str, Any] = {}
    if reasoning and with_reasoning:
        delta["reasoning"] = delta["reasoning_content"] = "".join(reasoning)
    if content:
        delta["content"] = "".join(content)
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def finish_reason(engine_reason: str | None, *, has_calls: bool, is_named: bool) -> str | None:
    """ "tool_calls" where the model has chosen to call and came to its end. A named call was no choice: "stop", as in OpenAI's
    API."""
    return "tool_calls" if engine_reason == "stop" and has_calls and not is_named else engine_reason
