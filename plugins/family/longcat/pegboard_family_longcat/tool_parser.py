"""Tool calls of Meituan LongCat-Flash: JSON between tags, a call in each.

    <longcat_tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </longcat_tool_call>

Format: https://huggingface.co/meituan-longcat/LongCat-Flash-Chat#tool-call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard.parsing import CallKeys, Markers, Steps, StreamParser, constrained_calls, read_call_object

START = Markers("<longcat_tool_call>")
END = "</longcat_tool_call>"
KEYS = CallKeys(needs_arguments=False)


class LongCatToolParser(StreamParser):
    def read(self) -> Steps[None]:
        while (yield from self.prose(START)):
            yield from self.attempt(self._call())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        def begin(name: str) -> str:
            return f'<longcat_tool_call>\n{{"name": {json.dumps(name)}, "arguments": '

        return constrained_calls(tools, begin, f"}}\n{END}", ["<longcat_tool_call>"]) if choice == "auto" else None

    def _call(self) -> Steps[bool]:
        yield from self.text.space()
        if not (yield from read_call_object(self.text, self.calls, KEYS)):
            return False
        self.text.forget()
        yield from self.text.closing(END)
        return True
