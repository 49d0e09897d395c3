"""Tool calls of ERNIE 4.5 Thinking.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Format: the chat template in https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-Thinking. A call is an element of its own; calls
follow one another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard.parsing import CallKeys, Markers, Steps, StreamParser, constrained_calls, read_call_object

START, END = "<tool_call>", "</tool_call>"
STARTS = Markers(START)
KEYS = CallKeys(needs_arguments=False)


class Ernie45ToolParser(StreamParser):
    def read(self) -> Steps[None]:
        while (yield from self.prose(STARTS)):
            yield from self.attempt(self._call())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        def begin(name: str) -> str:
            return f'{START}\n{{"name": {json.dumps(name)}, "arguments": '

        return constrained_calls(tools, begin, "}\n" + END, [START]) if choice == "auto" else None

    def _call(self) -> Steps[bool]:
        yield from self.text.space()
        if not (yield from read_call_object(self.text, self.calls, KEYS)):
            return False
        self.text.forget()
        yield from self.text.closing(END)
        return True
