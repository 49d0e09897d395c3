"""Tool calls of AI21 Jamba 1.5 and later: a JSON list between special tokens.

    <tool_calls>[
      {"name": "get_weather", "arguments": {"city": "Paris"}}
    ]</tool_calls>

Format: https://huggingface.co/ai21labs/AI21-Jamba-Mini-1.5#tool-use-with-jamba.
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

BEGIN = "<tool_calls>"
START = Markers(BEGIN)
END = "</tool_calls>"
STOPS = Stops(BEGIN, END)


class JambaToolParser(StreamParser):
    ends = (END,)

    def read(self) -> Steps[None]:
        while (yield from self.prose(START)):
            yield from self.attempt(self._calls())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        return (
            constrained_lists(tools, [(BEGIN, END)], ("[\n  ", "\n]"), ",\n  ")
            if choice == "auto"
            else None
        )

    def _calls(self) -> Steps[bool]:
        yield from self.text.space()
        if (yield from self.text.accept(END)):  # an empty element
            return True
        if not (yield from read_call_list(self.text, self.calls, stops=STOPS)):
            return False
        self.text.forget()
        yield from self.text.closing(END)
        return True
