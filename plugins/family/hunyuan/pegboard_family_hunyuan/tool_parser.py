"""Tool calls of Hunyuan-A13B.

    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]</tool_calls>

Format: https://huggingface.co/tencent/Hunyuan-A13B-Instruct, and the guide to function calls it links to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard.parsing import CallKeys, Markers, Steps, StreamParser, constrained_calls, read_call_list, read_call_object

START, END = "<tool_calls>", "</tool_calls>"
STARTS = Markers(START)
KEYS = CallKeys(needs_arguments=False)


class HunyuanToolParser(StreamParser):
    def read(self) -> Steps[None]:
        while (yield from self.prose(STARTS)):
            yield from self.attempt(self._section())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        def begin(name: str) -> str:
            return f'{START}[{{"name": {json.dumps(name)}, "arguments": '

        return constrained_calls(tools, begin, "}]" + END, [START]) if choice == "auto" else None

    def _section(self) -> Steps[bool]:
        yield from self.text.space()
        read = read_call_list if (yield from self.text.peek()) == "[" else read_call_object
        if not (yield from read(self.text, self.calls, KEYS)):
            return False
        self.text.forget()
        yield from self.text.closing(END)
        return True
