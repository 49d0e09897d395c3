"""Tool calls of IBM Granite.

Granite 3          <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, …]
Granite 20B FC     <function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}

Formats: the chat templates in https://huggingface.co/ibm-granite/granite-3.1-8b-instruct (whose
models also write <tool_call>) and
https://huggingface.co/ibm-granite/granite-20b-functioncalling. Neither format has an end marker.
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
    constrained_lists,
    read_call_list,
    read_call_object,
)

LIST_STARTS = ("<|tool_call|>", "<tool_call>")
LIST_START = Markers(*LIST_STARTS)
LIST_STOPS = Stops("<|tool_call|>", before={"<tool_call>": ("[",)})
OBJECT_START = Markers("<function_call>")
OBJECT_STOPS = Stops(before={"<function_call>": ("{",)})
THOUGHTS = {f"{here} my thought process:": f"{here} my response:" for here in ("Here is", "Here's")}


class GraniteToolParser(StreamParser):
    thoughts = THOUGHTS

    def read(self) -> Steps[None]:
        while (yield from self.prose(LIST_START)):
            yield from self.attempt(self._calls())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        return (
            constrained_lists(tools, [(start, "") for start in LIST_STARTS])
            if choice == "auto"
            else None
        )

    def _calls(self) -> Steps[bool]:
        yield from self.text.space()
        return (yield from read_call_list(self.text, self.calls, stops=LIST_STOPS))


class Granite20bFCToolParser(StreamParser):
    def read(self) -> Steps[None]:
        while (yield from self.prose(OBJECT_START)):
            yield from self.attempt(self._call())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        def begin(name: str) -> str:
            return f'<function_call> {{"name": {json.dumps(name)}, "arguments": '

        return (
            constrained_calls(tools, begin, "}", ["<function_call>"]) if choice == "auto" else None
        )

    def _call(self) -> Steps[bool]:
        yield from self.text.space()
        return (yield from read_call_object(self.text, self.calls, stops=OBJECT_STOPS))
