"""The message that answers a request: as one object, and as the events of a stream."""

from __future__ import annotations

from typing import Any

from pegboard.data.output import CompletionOutput
from pegboard_api_anthropic.blocks import Blocks, StreamEvent
from pegboard_chat.reading import ParsedOutput


class Message:
    """Feed it the outputs, take the events from it, and at the end the whole object."""

    def __init__(self, name: str, model: str) -> None:
        self._name = name
        self._model = model
        self._blocks = Blocks()
        self._has_begun = False
        self._usage: dict[str, int] = {}
        self._end: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def whole(self) -> dict[str, Any]:
        """The object of this moment."""
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
        """What one output adds; with the first one the beginning, with the last one the end."""
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
            news += [{"type": "message_delta", "delta": self._end, "usage": dict(self._usage)}, {"type": "message_stop"}]
        return news


def _ending(completion: CompletionOutput, *, has_calls: bool) -> dict[str, str | None]:
    if completion.finish_reason != "stop":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}
