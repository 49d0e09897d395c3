"""From events to content blocks, and to the events of Anthropic's stream about them. The whole message is the stream's blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pegboard.interfaces.output_parser import Content, Event, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart

StreamEvent = dict[str, Any]

CALL_ID = "chatcmpl-tool-"
"""How ids of calls begin whose format has none."""


class Blocks:
    """The content of one message, as it grows."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self.has_calls = False
        self._is_open = False
        self._parts: list[str] = []

    def read(self, events: Sequence[Event]) -> list[StreamEvent]:
        """What one output changes."""
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
                    own = f"toolu_{id.removeprefix(CALL_ID)}" if id.startswith(CALL_ID) else id
                    self._begin({"type": "tool_use", "id": own, "name": name, "input": {}}, news)
                case ToolCallArguments(_, text):
                    self._grow({"type": "input_json_delta", "partial_json": text}, text, news)
                case ToolCallEnd():
                    self.close(news)
        return news

    def close(self, news: list[StreamEvent]) -> None:
        """End the open block, if there is one."""
        if not self._is_open:
            return
        block, text = self.content[-1], "".join(self._parts)
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
        self._is_open, self._parts = True, []
        news.append(self._event("start", content_block=dict(block)))

    def _grow(self, delta: dict[str, Any], text: str, news: list[StreamEvent]) -> None:
        assert self._is_open, "events come in order"
        self._parts.append(text)
        news.append(self._event("delta", delta=delta))

    def _event(self, name: str, **fields: Any) -> StreamEvent:
        return {"type": f"content_block_{name}", "index": len(self.content) - 1, **fields}


def _input(text: str) -> dict[str, Any]:
    """Arguments as an object. What was cut off and is no JSON is handed on as Anthropic advises for such input."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
