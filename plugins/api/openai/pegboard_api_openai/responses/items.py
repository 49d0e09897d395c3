"""From events to items, and to the events of OpenAI's stream about them. The whole answer is the stream's items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from pegboard.interfaces.output_parser import Content, Event, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart

StreamEvent = dict[str, Any]

CALL_ID = "chatcmpl-tool-"
"""How ids of calls begin whose format has none."""


class Items:
    """The items of one response, as they grow. with_reasoning: False drops it."""

    def __init__(self, *, with_reasoning: bool = True) -> None:
        self.items: list[dict[str, Any]] = []
        self.has_calls = False
        self._with_reasoning = with_reasoning
        self._open: _Open | None = None

    def read(self, events: Sequence[Event], logprobs: Sequence[dict[str, Any]] | None = None) -> list[StreamEvent]:
        """What one output changes. logprobs: of its tokens; they belong to its text, if it has any."""
        news: list[StreamEvent] = []
        for event in events:
            match event:
                case Content(text):
                    self._switch("message", news)
                    self._grow(text, news, logprobs)
                    logprobs = [] if logprobs is not None else None
                case Reasoning(text) if self._with_reasoning:
                    self._switch("reasoning", news)
                    self._grow(text, news)
                case ToolCallStart(_, id, name):
                    self.has_calls = True
                    self._close(news)
                    self._begin(_Call(len(self.items), id, name), news)
                case ToolCallArguments(_, text):
                    self._grow(text, news)
                case ToolCallEnd():
                    self._close(news)
        return news

    def finish(self, *, is_complete: bool) -> list[StreamEvent]:
        """The end. is_complete: False when the answer was cut off, and with it the item that was being written."""
        news: list[StreamEvent] = []
        self._close(news, "completed" if is_complete else "incomplete")
        return news

    def _switch(self, kind: str, news: list[StreamEvent]) -> None:
        """Go on in an open item of this kind, or open one."""
        if self._open is None or self._open.item["type"] != kind:
            self._close(news)
            self._begin(_Message(len(self.items)) if kind == "message" else _Reasoning(len(self.items)), news)

    def _begin(self, opened: "_Open", news: list[StreamEvent]) -> None:
        self._open = opened
        self.items.append(opened.item)
        news += opened.begin()

    def _grow(self, text: str, news: list[StreamEvent], logprobs: Sequence[dict[str, Any]] | None = None) -> None:
        assert self._open is not None, "events come in order"
        news += self._open.grow(text, logprobs)

    def _close(self, news: list[StreamEvent], status: str = "completed") -> None:
        if self._open is not None:
            news += self._open.end(status)
            self._open = None


class _Open:
    """An item that is being written. `item` gets its text at the end."""

    def __init__(self, index: int, prefix: str, kind: str, **fields: Any) -> None:
        self.item: dict[str, Any] = {"id": f"{prefix}_{uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self._index = index
        self._parts: list[str] = []

    def begin(self) -> list[StreamEvent]:
        return [{"type": "response.output_item.added", "output_index": self._index, "item": dict(self.item)}]

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]] | None) -> list[StreamEvent]:
        self._parts.append(text)
        return []

    def end(self, status: str) -> list[StreamEvent]:
        self.item["status"] = status
        return [{"type": "response.output_item.done", "output_index": self._index, "item": self.item}]

    def _event(self, event: str, **fields: Any) -> StreamEvent:
        return {"type": f"response.{event}", "item_id": self.item["id"], "output_index": self._index, **fields}


class _Message(_Open):
    def __init__(self, index: int) -> None:
        super().__init__(index, "msg", "message", role="assistant", content=[])
        self._logprobs: list[dict[str, Any]] = []

    def begin(self) -> list[StreamEvent]:
        return [*super().begin(), self._event("content_part.added", content_index=0, part=self._part("", []))]

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]] | None) -> list[StreamEvent]:
        super().grow(text, logprobs)
        self._logprobs += logprobs or ()
        return [self._event("output_text.delta", content_index=0, delta=text, logprobs=list(logprobs or ()))]

    def end(self, status: str) -> list[StreamEvent]:
        text = "".join(self._parts)
        part = self._part(text, self._logprobs)
        self.item["content"] = [part]
        return [
            self._event("output_text.done", content_index=0, text=text, logprobs=part["logprobs"]),
            self._event("content_part.done", content_index=0, part=part),
            *super().end(status),
        ]

    @staticmethod
    def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class _Reasoning(_Open):
    def __init__(self, index: int) -> None:
        super().__init__(index, "rs", "reasoning", summary=[], content=[], encrypted_content=None)

    def begin(self) -> list[StreamEvent]:
        part = {"type": "reasoning_text", "text": ""}
        return [*super().begin(), self._event("content_part.added", content_index=0, part=part)]

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]] | None) -> list[StreamEvent]:
        super().grow(text, logprobs)
        return [self._event("reasoning_text.delta", content_index=0, delta=text)]

    def end(self, status: str) -> list[StreamEvent]:
        part = {"type": "reasoning_text", "text": "".join(self._parts)}
        self.item["content"] = [part]
        return [
            self._event("reasoning_text.done", content_index=0, text=part["text"]),
            self._event("content_part.done", content_index=0, part=part),
            *super().end(status),
        ]


class _Call(_Open):
    def __init__(self, index: int, call_id: str, name: str) -> None:
        own = f"call_{call_id.removeprefix(CALL_ID)}" if call_id.startswith(CALL_ID) else call_id
        super().__init__(index, "fc", "function_call", call_id=own, name=name, arguments="")

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]] | None) -> list[StreamEvent]:
        super().grow(text, logprobs)
        return [self._event("function_call_arguments.delta", delta=text)]

    def end(self, status: str) -> list[StreamEvent]:
        self.item["arguments"] = "".join(self._parts)
        done = self._event("function_call_arguments.done", name=self.item["name"], arguments=self.item["arguments"])
        return [done, *super().end(status)]
