"""Converts OpenAI's messages to those of mistral-common. There, ids of calls have nine letters and
digits, reasoning is part of the content, and a tool's answer may contain the tool's name."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import string
import wave
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pegboard.errors import RequestError

CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")
LETTERS = string.ascii_letters + string.digits
REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")


def call_id(given: str) -> str:
    """Returns `given` if Mistral's formats accept it. Otherwise returns nine letters and digits
    derived from it, which are the same in the call and in the tool's answer."""
    if CALL_ID.fullmatch(given):
        return given
    number = int.from_bytes(hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest(), "big")
    return "".join(LETTERS[number // len(LETTERS) ** place % len(LETTERS)] for place in range(9))


def mistral_messages(
    messages: Sequence[Mapping[str, Any]], *, with_reasoning: bool
) -> list[dict[str, Any]]:
    """Returns messages in the form that `ChatCompletionRequest.from_openai` accepts.
    with_reasoning: False leaves out reasoning, for tokenizers whose format cannot write it. Raises
    RequestError naming `messages`."""
    names: dict[str, str] = {}
    result = []
    for message in messages:
        role = message.get("role")
        if role in ("system", "developer"):
            result.append({"role": "system", "content": _parts(message)})
        elif role == "assistant":
            result.append(_assistant(message, names, with_reasoning))
        elif role == "tool":
            answer = {"role": "tool", "content": _text(message)}
            if isinstance(given := message.get("tool_call_id"), str):
                answer["tool_call_id"] = call_id(given)
                answer |= {"name": names[given]} if given in names else {}
            result.append(answer)
        else:
            result.append({"role": role, "content": _parts(message)})
    return result


def mistral_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Returns function tools with the fields that mistral-common supports. A tool without a schema
    gets an empty object."""
    result = []
    for tool in tools or ():
        function = tool["function"]
        kept: dict[str, Any] = {
            "name": function["name"],
            "description": function.get("description") or "",
        }
        kept["parameters"] = function.get("parameters") or {"type": "object", "properties": {}}
        result.append({"type": "function", "function": kept})
    return result or None


def _assistant(
    message: Mapping[str, Any], names: dict[str, str], with_reasoning: bool
) -> dict[str, Any]:
    """Converts a message. names: the names of the calls by id, which this function fills in."""
    content: str | list[dict[str, Any]] = _text(message)
    reasoning = next((message[field] for field in REASONING_FIELDS if message.get(field)), None)
    if reasoning and with_reasoning:
        text = [{"type": "text", "text": content}] if content else []
        content = [{"type": "thinking", "thinking": reasoning, "closed": True}, *text]
    result: dict[str, Any] = {"role": "assistant", "content": content or None}
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        given = str(call.get("id") or "")
        names[given] = function["name"]
        calls.append({"id": call_id(given), "type": "function", "function": _call(function)})
    if calls:
        result["tool_calls"] = calls
    elif not content:
        result["content"] = ""
    return result


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            json.loads(arguments)
        except ValueError as error:
            name = function["name"]
            raise RequestError(
                f"arguments of the tool call {name!r} are not valid JSON: {error}",
                parameter="messages",
            ) from error
    return {"name": function["name"], "arguments": arguments}


def _parts(message: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return [
        silence() if _is_audio(part) else {"type": "text", "text": _text_of(part)}
        for part in content
    ]


def _is_audio(part: Any) -> bool:
    """Whether an audio stands here, which the engine has already."""
    return isinstance(part, Mapping) and part.get("type") == "audio" and "placeholder" in part


@cache
def silence() -> dict[str, Any]:
    """Return a part with audio of mistral-common's kind. Its place is what counts."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(3200))
    data = base64.b64encode(content.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def one_each(token_ids: Sequence[int], token_id: int | None) -> list[int]:
    """Return the ids with one `token_id` instead of several after each other: mistral-common
    writes as many as an audio has rows."""
    before = [None, *token_ids]
    return [
        one for one, last in zip(token_ids, before, strict=False) if one != token_id or one != last
    ]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(_texts(content))


def _texts(parts: Sequence[Any]) -> list[str]:
    return [_text_of(part) for part in parts]


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RequestError(
            "the tokenizer 'mistral' writes only text and the audio of users, but got a part of "
            f"type {kind!r}",
            parameter="messages",
        )
    return text
