"""Turns events into output items and into the events of OpenAI's stream. A whole answer consists of
the same items as the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.builtin_tool import ToolFunction
from pegboard.interfaces.output_parser import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from pegboard_api_responses.builtin_items import FORMS, BuiltinCall, IgnoredCall
from pegboard_api_responses.open_items import (
    FunctionCallItem,
    MessageItem,
    OpenItem,
    ReasoningItem,
    StreamEvent,
)


class Items:
    """The items of one response, as they grow.

    with_reasoning: False drops the reasoning. builtin: the functions that the server runs, by the
    names that the model may use. max_builtin: how many calls of these may become items. `written`
    holds the items that the conversation continues with. It also has reasoning that is not shown,
    and calls that were ignored. `pending` holds the calls that wait to be run.
    """

    def __init__(
        self,
        *,
        with_reasoning: bool = True,
        builtin: Mapping[str, ToolFunction] | None = None,
        max_builtin: int = 0,
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self.written: list[dict[str, Any] | BuiltinCall] = []
        self.pending: list[BuiltinCall] = []
        self.num_ignored = 0
        self.num_client_calls = 0
        self._with_reasoning = with_reasoning
        self._builtin = builtin or {}
        self._num_left = max_builtin
        self._open: OpenItem | None = None

    def read(
        self, events: Sequence[Event], logprobs: Sequence[dict[str, Any]] | None = None
    ) -> list[StreamEvent]:
        """Returns the stream's events for one output. logprobs are those of the output's tokens.
        They are attached to its text, if it has any."""
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
                case Reasoning(text):
                    self._hide(text)
                case ToolCallStart(_, id, name):
                    self._close(news)
                    self._begin(self._call(id, name), news)
                case ToolCallArguments(_, text):
                    self._grow(text, news)
                case ToolCallEnd():
                    self._close(news)
        return news

    def finish(self, *, is_complete: bool) -> list[StreamEvent]:
        """End an output. is_complete is False when the answer was cut off: then the item that was
        being written is incomplete, and pending calls are given up."""
        news: list[StreamEvent] = []
        self._close(news, "completed" if is_complete else "incomplete")
        if not is_complete:
            for call in self.pending:
                news += call.give_up()
            self.pending.clear()
        return news

    def _call(self, id: str, name: str) -> OpenItem:
        function = self._builtin.get(name)
        if function is None:
            self.num_client_calls += 1
            return FunctionCallItem(len(self.items), id, name)
        if not self._num_left:
            self.num_ignored += 1
            return IgnoredCall(len(self.items), id, function)
        self._num_left -= 1
        call: BuiltinCall = FORMS[function.item](
            len(self.items), id, function, [item["id"] for item in self.items]
        )
        return call

    def _switch(self, kind: str, news: list[StreamEvent]) -> None:
        """Continue the open item if it is of this kind, otherwise open a new one."""
        if self._open is None or self._open.item["type"] != kind:
            self._close(news)
            self._begin(
                MessageItem(len(self.items))
                if kind == "message"
                else ReasoningItem(len(self.items)),
                news,
            )

    def _hide(self, text: str) -> None:
        last = self.written[-1] if self.written else None
        if isinstance(last, dict) and last["type"] == "reasoning":
            last["content"][0]["text"] += text
        else:
            self.written.append(
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}
            )

    def _begin(self, opened: OpenItem, news: list[StreamEvent]) -> None:
        self._open = opened
        self.written.append(opened if isinstance(opened, BuiltinCall) else opened.item)
        if not isinstance(opened, IgnoredCall):
            self.items.append(opened.item)
        news += opened.begin()

    def _grow(
        self, text: str, news: list[StreamEvent], logprobs: Sequence[dict[str, Any]] | None = None
    ) -> None:
        assert self._open is not None, "events come in order"
        news += self._open.grow(text, logprobs)

    def _close(self, news: list[StreamEvent], status: str = "completed") -> None:
        opened = self._open
        self._open = None
        if opened is None:
            return
        news += opened.end(status)
        if (
            status == "completed"
            and isinstance(opened, BuiltinCall)
            and not isinstance(opened, IgnoredCall)
        ):
            self.pending.append(opened)
