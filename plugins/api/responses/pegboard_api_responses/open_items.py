"""Output items while they are being written, and the events of OpenAI's stream for each of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

StreamEvent = dict[str, Any]

CALL_ID = "chatcmpl-tool-"
"""The prefix of call ids that Pegboard made because the model's format has no ids."""
OWN_ID = re.compile(r"[A-Za-z0-9]{1,64}")


class OpenItem:
    """An item that is being written. `item` gets its text when it ends."""

    def __init__(self, index: int, item_id: str, kind: str, **fields: Any) -> None:
        self.item: dict[str, Any] = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self._index = index
        self._parts: list[str] = []

    def begin(self) -> list[StreamEvent]:
        return [
            {
                "type": "response.output_item.added",
                "output_index": self._index,
                "item": dict(self.item),
            }
        ]

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]] | None) -> list[StreamEvent]:
        self._parts.append(text)
        return []

    def end(self, status: str) -> list[StreamEvent]:
        self.item["status"] = status
        return [
            {
                "type": "response.output_item.done",
                "output_index": self._index,
                "item": dict(self.item),
            }
        ]

    def event(self, event: str, **fields: Any) -> StreamEvent:
        return {
            "type": f"response.{event}",
            "item_id": self.item["id"],
            "output_index": self._index,
            **fields,
        }


class MessageItem(OpenItem):
    def __init__(self, index: int) -> None:
        super().__init__(index, fresh_name("msg"), "message", role="assistant", content=[])
        self._logprobs: list[dict[str, Any]] = []

    def begin(self) -> list[StreamEvent]:
        return [
            *super().begin(),
            self.event("content_part.added", content_index=0, part=self._part("", [])),
        ]

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]] | None) -> list[StreamEvent]:
        super().grow(text, logprobs)
        self._logprobs += logprobs or ()
        return [
            self.event(
                "output_text.delta", content_index=0, delta=text, logprobs=list(logprobs or ())
            )
        ]

    def end(self, status: str) -> list[StreamEvent]:
        text = "".join(self._parts)
        part = self._part(text, self._logprobs)
        self.item["content"] = [part]
        return [
            self.event("output_text.done", content_index=0, text=text, logprobs=part["logprobs"]),
            self.event("content_part.done", content_index=0, part=part),
            *super().end(status),
        ]

    @staticmethod
    def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ReasoningItem(OpenItem):
    def __init__(self, index: int) -> None:
        super().__init__(
            index, fresh_name("rs"), "reasoning", summary=[], content=[], encrypted_content=None
        )

    def begin(self) -> list[StreamEvent]:
        part = {"type": "reasoning_text", "text": ""}
        return [*super().begin(), self.event("content_part.added", content_index=0, part=part)]

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]] | None) -> list[StreamEvent]:
        super().grow(text, logprobs)
        return [self.event("reasoning_text.delta", content_index=0, delta=text)]

    def end(self, status: str) -> list[StreamEvent]:
        part = {"type": "reasoning_text", "text": "".join(self._parts)}
        self.item["content"] = [part]
        return [
            self.event("reasoning_text.done", content_index=0, text=part["text"]),
            self.event("content_part.done", content_index=0, part=part),
            *super().end(status),
        ]


class FunctionCallItem(OpenItem):
    """A call of a function that the client runs."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        item_call = (
            f"call_{call_id.removeprefix(CALL_ID)}" if call_id.startswith(CALL_ID) else call_id
        )
        super().__init__(
            index, fresh_name("fc"), "function_call", call_id=item_call, name=name, arguments=""
        )

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]] | None) -> list[StreamEvent]:
        super().grow(text, logprobs)
        return [self.event("function_call_arguments.delta", delta=text)]

    def end(self, status: str) -> list[StreamEvent]:
        self.item["arguments"] = "".join(self._parts)
        done = self.event(
            "function_call_arguments.done", name=self.item["name"], arguments=self.item["arguments"]
        )
        return [done, *super().end(status)]


def fresh_name(prefix: str) -> str:
    """The id of an item."""
    return f"{prefix}_{uuid4().hex}"
