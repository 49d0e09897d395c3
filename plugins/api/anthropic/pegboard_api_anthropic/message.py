"""The message that answers a request, as one object or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pegboard.data.output import CompletionOutput
from pegboard.interfaces.output_parser import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from pegboard_chat.chats import ParsedOutput


class Message:
    """Reads outputs and returns the events of the stream. At the end it also has the whole
    object."""

    def __init__(self, name: str, model: str) -> None:
        self._name = name
        self._model = model
        self._blocks = Blocks()
        self._has_begun = False
        self._usage: dict[str, int] = {}
        self._end: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def whole(self) -> dict[str, Any]:
        """The object as it is now."""
        return {
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks.content),
            **self._end,
            "usage": dict(self._usage),
        }

    def read(self, output: ParsedOutput) -> list[StreamEvent]:
        """Returns the events of one output. The first output also begins the message, and the last
        output ends it."""
        (completion,) = output.outputs
        news: list[StreamEvent] = []
        if not self._has_begun:
            self._has_begun = True
            cached = output.num_cached_tokens or 0
            self._usage = {
                "input_tokens": len(output.prompt_token_ids or ()) - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": 0,
            }
            news.append({"type": "message_start", "message": self.whole()})
        self._usage["output_tokens"] += len(completion.token_ids)
        news += self._blocks.read(output.events[completion.index])
        if completion.finish_reason is not None:
            self._blocks.close(news)
            self._end = _ending(completion, has_calls=self._blocks.has_calls)
            news += [
                {"type": "message_delta", "delta": self._end, "usage": dict(self._usage)},
                {"type": "message_stop"},
            ]
        return news


def _ending(completion: CompletionOutput, *, has_calls: bool) -> dict[str, str | None]:
    if completion.finish_reason != "stop":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


StreamEvent = dict[str, Any]

CALL_ID = "chatcmpl-tool-"
"""The prefix of call ids that Pegboard made because the model's format has no ids."""


class Blocks:
    """The content of one message while it is being written."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self.has_calls = False
        self._is_open = False
        self._parts: list[str] = []

    def read(self, events: Sequence[Event]) -> list[StreamEvent]:
        """Returns the events of one output."""
        news: list[StreamEvent] = []
        for event in events:
            match event:
                case Content(text):
                    self._switch({"type": "text", "text": ""}, news)
                    self._grow({"type": "text_delta", "text": text}, text, news)
                case Reasoning(text):
                    self._switch({"type": "thinking", "thinking": "", "signature": ""}, news)
                    self._grow({"type": "thinking_delta", "thinking": text}, text, news)
                case ToolCallStart(_, id, name):
                    self.has_calls = True
                    self.close(news)
                    tool_id = f"toolu_{id.removeprefix(CALL_ID)}" if id.startswith(CALL_ID) else id
                    self._begin(
                        {"type": "tool_use", "id": tool_id, "name": name, "input": {}}, news
                    )
                case ToolCallArguments(_, text):
                    self._grow({"type": "input_json_delta", "partial_json": text}, text, news)
                case ToolCallEnd():
                    self.close(news)
        return news

    def close(self, news: list[StreamEvent]) -> None:
        """End the open block, if there is one."""
        if not self._is_open:
            return
        block = self.content[-1]
        text = "".join(self._parts)
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            news.append(self._event("delta", delta={"type": "signature_delta", "signature": ""}))
        news.append(self._event("stop"))
        self._is_open = False

    def _switch(self, block: dict[str, Any], news: list[StreamEvent]) -> None:
        if not self._is_open or self.content[-1]["type"] != block["type"]:
            self.close(news)
            self._begin(block, news)

    def _begin(self, block: dict[str, Any], news: list[StreamEvent]) -> None:
        self.content.append(block)
        self._is_open = True
        self._parts = []
        news.append(self._event("start", content_block=dict(block)))

    def _grow(self, delta: dict[str, Any], text: str, news: list[StreamEvent]) -> None:
        assert self._is_open, "events come in order"
        self._parts.append(text)
        news.append(self._event("delta", delta=delta))

    def _event(self, name: str, **fields: Any) -> StreamEvent:
        return {"type": f"content_block_{name}", "index": len(self.content) - 1, **fields}


def _input(text: str) -> dict[str, Any]:
    """The arguments as an object. Text that is not JSON (because it was cut off) is wrapped in an
    object, as Anthropic advises."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
