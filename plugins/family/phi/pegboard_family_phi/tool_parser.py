"""Tool calls of Microsoft Phi-4-mini: a JSON list after a marker.

    functools[{"name": "get_weather", "arguments": {"city": "Paris"}}, …]
    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, …]<|/tool_call|>

Formats: https://github.com/microsoft/PhiCookBook (function calling with Phi-4-mini), and the
special tokens in https://huggingface.co/microsoft/Phi-4-mini-instruct. The prompt decides which of
them a model writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing import (
    Markers,
    Steps,
    Stops,
    StreamParser,
    constrained_lists,
    read_call_list,
)

WORD = "functools"
START = "<|tool_call|>"
END = "<|/tool_call|>"
STARTS = Markers(WORD, START)
STOPS = Stops(START, END, before={WORD: ("[",)})


class Phi4MiniToolParser(StreamParser):
    ends = (END,)

    def read(self) -> Steps[None]:
        while marker := (yield from self.prose(STARTS)):
            yield from self.attempt(self._calls(marker))

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        return constrained_lists(tools, [(WORD, ""), (START, END)]) if choice == "auto" else None

    def _calls(self, marker: str) -> Steps[bool]:
        count = self.calls.count
        yield from self.text.space()
        if not (yield from read_call_list(self.text, self.calls, stops=STOPS)):
            return False
        if marker == WORD:
            return self.calls.count > count  # a word before an empty list is text
        self.text.forget()
        yield from self.text.closing(END)
        return True
