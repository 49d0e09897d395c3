"""Turns items into messages for the chat template, and the items of an answer into messages of the
next turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.errors import MalformedRequest
from pegboard.interfaces.builtin_tool import ToolFunction
from pegboard_api_responses.builtin_items import (
    FORMS,
    BuiltinCall,
    Exchange,
    exchange_of,
    read_exchange,
)
from pegboard_chat.openai_format import read_content, read_messages
from pegboard_chat.request_body import shown

UNFINISHED = ("in_progress", "incomplete")
LISTED = "mcp_list_tools"
"""The type of an item that lists a server's tools. It is skipped, because the request's own `tools`
list them."""


def read_input(
    value: str | Sequence[Mapping[str, Any]], functions: Sequence[ToolFunction] = ()
) -> list[dict[str, Any]]:
    """Returns the messages of `input`. Consecutive reasoning, text and calls become one message of
    the assistant, because templates expect that. functions: those of the request's built-in tools.
    Raises MalformedRequest naming `input[i].field`."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        _add(messages, item, f"input[{index}]", functions)
    if not messages:
        raise MalformedRequest("input must not be empty", parameter="input")
    return messages


def is_unfinished(value: str | Sequence[Mapping[str, Any]]) -> bool:
    """True if the last item is an unfinished message of the assistant, which the model must
    continue."""
    if isinstance(value, str) or not value:
        return False
    last = value[-1]
    return (
        last.get("type", "message") == "message"
        and last.get("role") == "assistant"
        and last.get("status") in UNFINISHED
    )


def conversation(
    instructions: str | None,
    before: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Returns all messages of a prompt, checked. Instructions apply to one response only, so
    `before` does not contain earlier instructions."""
    system = [{"role": "system", "content": instructions}] if instructions else []
    return read_messages([*system, *before, *messages])


def as_messages(items: Sequence[Mapping[str, Any] | BuiltinCall]) -> list[dict[str, Any]]:
    """The written items of an answer (`Items.written`), as messages of the next turn's prompt."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, BuiltinCall):
            _add_exchange(messages, exchange_of(item))
        else:
            _add(messages, item, "output")
    return messages


def _add(
    messages: list[dict[str, Any]],
    item: Mapping[str, Any],
    path: str,
    functions: Sequence[ToolFunction] = (),
) -> None:
    """Add one item: as a new message, or as a part of the assistant's message before it."""
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        _add_message(messages, item, path)
    elif kind == "reasoning":
        _join(messages, "reasoning", _reasoning_text(item, path))
    elif kind == "function_call":
        call_id, name, arguments = (
            _string(item.get(field), f"{path}.{field}")
            for field in ("call_id", "name", "arguments")
        )
        _add_call(messages, call_id, name, arguments)
    elif kind == "function_call_output":
        content = read_content(item.get("output"), f"{path}.output")
        messages.append(
            {
                "role": "tool",
                "tool_call_id": _string(item.get("call_id"), f"{path}.call_id"),
                "content": content,
            }
        )
    elif isinstance(kind, str) and kind in FORMS:
        try:
            _add_exchange(messages, read_exchange(item, functions))
        except ValueError as error:
            field = str(error)
            raise MalformedRequest(
                f"{path}.{field} is not {kind}'s: got {shown(item.get(field))}",
                parameter=f"{path}.{field}",
            ) from error
    elif kind != LISTED:
        raise MalformedRequest(
            f"{path}.type: expected message, reasoning, function_call, function_call_output, "
            f"{', '.join(FORMS)} or {LISTED}, got {shown(kind)}",
            parameter=f"{path}.type",
        )


def _add_call(messages: list[dict[str, Any]], call_id: str, name: str, arguments: str) -> None:
    last = _assistant(messages)
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    last.setdefault("tool_calls", []).append(call)


def _add_exchange(messages: list[dict[str, Any]], exchange: Exchange | None) -> None:
    """Add a call that the server ran and its result."""
    if exchange is not None:
        _add_call(messages, exchange.call_id, exchange.name, exchange.arguments)
        messages.append(
            {"role": "tool", "tool_call_id": exchange.call_id, "content": exchange.output}
        )


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any], path: str) -> None:
    is_answer = item.get("role") == "assistant"
    content = read_content(item.get("content"), f"{path}.content", with_media=not is_answer)
    if is_answer:
        _join(messages, "content", content)
    else:
        messages.append({"role": item.get("role"), "content": content})


def _join(messages: list[dict[str, Any]], field: str, text: str) -> None:
    """Set the field in the assistant's last message. Starts a new message if the last one already
    has this field, or a field that comes later."""
    last = messages[-1] if messages else {}
    later = {
        "reasoning": ("reasoning", "content", "tool_calls"),
        "content": ("content", "tool_calls"),
    }[field]
    if last.get("role") == "assistant" and not any(name in last for name in later):
        last[field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the assistant's message at the end of the conversation. Adds one if the last message
    is not the assistant's."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _reasoning_text(item: Mapping[str, Any], path: str) -> str:
    """The text of the reasoning's content, else of its summary."""
    if item.get("encrypted_content"):
        raise MalformedRequest(
            f"{path}.encrypted_content is not supported: send the reasoning's content",
            parameter=path,
        )
    for name in ("content", "summary"):
        parts = item.get(name) or ()
        if not isinstance(parts, list | tuple) or not all(isinstance(part, dict) for part in parts):
            raise MalformedRequest(
                f"{path}.{name}: expected a list of parts, got {shown(parts)}",
                parameter=f"{path}.{name}",
            )
        if parts:
            return "".join(_string(part.get("text"), f"{path}.{name}.text") for part in parts)
    return ""


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise MalformedRequest(f"{path}: expected a string, got {shown(value)}", parameter=path)
    return value
