"""Tool calls of Hermes 2 Pro and later, and of the models that write them in the same way (Qwen2.5, Qwen3, …).

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Format: https://github.com/NousResearch/Hermes-Function-Calling#prompt-format-for-function-calling. A call is an element of its
own; calls follow one another. The end tag may be missing at the end of the text, and a list of calls may stand in one element.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard.parsing import CallKeys, Markers, Steps, StreamParser, constrained_calls, read_call_list, read_call_object

START = Markers("<tool_call>")
END = "</tool_call>"
KEYS = CallKeys(arguments=("arguments", "parameters"), needs_arguments=False)


class HermesToolParser(StreamParser):
    def read(self) -> Steps[None]:
        while (yield from self.prose(START)):
            yield from self.attempt(self._call())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        def begin(name: str) -> str:
            return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": '

        return constrained_calls(tools, begin, "}\n</tool_call>", ["<tool_call>"]) if choice == "auto" else None

    def _call(self) -> Steps[bool]:
        yield from self.text.space()
        read = read_call_list if (yield from self.text.peek()) == "[" else read_call_object
        if not (yield from read(self.text, self.calls, KEYS)):
            return False
        self.text.forget()
        yield from self.text.closing(END)
        return True
