"""Messages as templates want them: plain data, content as text or as parts, tool arguments as objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.errors import RequestError

_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def plain_value(value: Any) -> Any:
    """A deep copy made of dict, list, str, int, float, bool and None only, so that a template finds no methods to misuse."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return f"<{type(value).__name__}>"


def plain_messages(messages: Sequence[Mapping[str, Any]], *, has_parts: bool, has_strings: bool) -> list[dict[str, Any]]:
    """Copies of `messages` for one template.

    has_parts: the template walks over content parts; without it text parts are joined by line feeds. A template that only
    knows parts (has_parts and not has_strings) gets strings as one text part.
    """
    plain = []
    for message in messages:
        copy = plain_value(message)
        content = copy.get("content")
        if isinstance(content, list) and not has_parts:
            copy["content"] = _joined(content)
        elif isinstance(content, str) and has_parts and not has_strings:
            copy["content"] = [{"type": "text", "text": content}]
        for call in copy.get("tool_calls") or ():
            _parse_arguments(call)
        reasoning = next((copy[field] for field in _REASONING_FIELDS if copy.get(field) is not None), None)
        if reasoning is not None:  # clients and templates disagree on the name
            copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
        plain.append(copy)
    return plain


def text_in_reasoning(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """`messages`, where text that stands between reasoning and calls is the end of the reasoning; None when there is none.

    For templates that refuse a message with all three (gpt-oss's, whose model does write all three)."""
    found = False
    joined = []
    for message in messages:
        text, reasoning = message.get("content"), message.get("thinking")
        if message.get("tool_calls") and isinstance(text, str) and text and isinstance(reasoning, str) and reasoning:
            found = True
            both = f"{reasoning}\n\n{text}"
            message = {**message, "content": "", **{name: both for name in _REASONING_FIELDS if name in message}}
        joined.append(dict(message))
    return joined if found else None


def _joined(parts: list[Any]) -> str:
    texts = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f"the chat template of this model takes text only, got a part of type {kind!r}", parameter="messages"
            )
        texts.append(text)
    return "\n".join(texts)


def _parse_arguments(call: Any) -> None:
    """OpenAI sends arguments as a JSON string; templates print them as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return
    try:
        function["arguments"] = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        name = function.get("name")
        raise RequestError(f"arguments of the tool call {name!r} are not valid JSON: {error}", parameter="messages") from error


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """Finds in the rendered text where the last message's content ended."""

    content: str

    def cut(self, text: str) -> str:
        """`text` without everything behind that content. Raises RequestError if the template changed or dropped it."""
        mark = _END_MARK.strip()
        if self.content.strip() not in text or mark not in text:
            raise RequestError(
                "continue_final_message: the chat template drops or changes the last message, so it cannot be continued",
                parameter="continue_final_message",
            )
        place = text.rindex(mark)
        is_untrimmed = text.startswith(_END_MARK, place)
        return text[:place] if is_untrimmed else text[:place].rstrip()


def mark_end(messages: list[dict[str, Any]]) -> MessageEnd:
    """Append a mark to the last message's (last) text, in place. The mark ends with a space: a template that trims takes the
    space away, which tells that trailing spaces of the content went too."""
    holder: dict[str, Any] | None = messages[-1] if messages else None
    field = "content"
    if holder is not None and isinstance(holder.get("content"), list):
        parts = [part for part in holder["content"] if isinstance(part, dict) and isinstance(part.get("text"), str)]
        holder, field = (parts[-1] if parts else None), "text"
    if holder is None or not isinstance(holder.get(field), str):
        raise RequestError("continue_final_message: the last message has no text to continue", parameter="continue_final_message")
    content = holder[field]
    holder[field] = content + _END_MARK
    return MessageEnd(content)
