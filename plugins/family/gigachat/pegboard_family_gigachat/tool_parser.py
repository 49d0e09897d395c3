"""Tool calls of GigaChat 3: a call is a separate message with JSON, after the content.

    I will look.<|message_sep|>

    function call<|role_sep|>
    {"name": "get_weather", "arguments": {"city": "Paris"}}

GigaChat 3.1 writes <|function_call|> instead of the separator and the role. Format: the chat
templates in https://huggingface.co/ai-sage/GigaChat3-10B-A1.8B and
https://huggingface.co/ai-sage/GigaChat3.1-10B-A1.8B.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing import (
    Markers,
    Steps,
    Stops,
    StreamParser,
    constrained_calls,
    read_call_object,
)

SEPARATOR = "<|message_sep|>"
ROLE = "function call<|role_sep|>"
STARTS = Markers(SEPARATOR, ROLE, "<|function_call|>")
ENDS = (SEPARATOR, "</s>")
STOPS = Stops(*ENDS, "<|role_sep|>", "<|function_call|>")


class GigaChat3ToolParser(StreamParser):
    ends = ("<|role_sep|>", "</s>")

    def read(self) -> Steps[None]:
        while marker := (yield from self.prose(STARTS)):
            yield from self.attempt(self._call(marker))

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        def begin(name: str) -> str:
            return f'{ROLE}\n{{"name": {json.dumps(name)}, "arguments": '

        return constrained_calls(tools, begin, "}", [ROLE]) if choice == "auto" else None

    def _call(self, marker: str) -> Steps[bool]:
        yield from self.text.space()
        if marker == SEPARATOR:
            if not (yield from self.text.accept(ROLE, "<|function_call|>")):
                return False
            yield from self.text.space()
        if not (yield from read_call_object(self.text, self.calls, stops=STOPS)):
            return False
        self.text.forget()
        yield from self.text.closing(*ENDS)
        return True
