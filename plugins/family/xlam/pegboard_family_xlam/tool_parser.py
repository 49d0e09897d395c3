"""Tool calls of Salesforce xLAM: a JSON list, which is the whole output.

    [{"name": "get_weather", "arguments": {"city": "Paris"}}, …]

Format: https://huggingface.co/Salesforce/Llama-xLAM-2-8b-fc-r. Some models write the list after
their reasoning, in a code fence, between <tool_call> tags, or after [TOOL_CALLS].
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
    read_call_list,
)

THINK_END = "</think>"
ENDS = {"```json": "```", "```": "```", "<tool_call>": "</tool_call>", "[TOOL_CALLS]": ""}
"""Text that may precede the list → the text that follows the list in this case."""
STARTS = Markers(THINK_END, *ENDS)
STOPS = Stops(
    "[TOOL_CALLS]", before={"```": (), "</tool_call>": ("<tool_call>",), "<tool_call>": ("[",)}
)


class XlamToolParser(StreamParser):
    ends = ("</tool_call>",)

    def read(self) -> Steps[None]:
        yield from self.prompted_thought()
        yield from self._bare()
        while marker := (yield from self.prose(STARTS)):
            if marker == THINK_END:  # the beginning of the reasoning is not in the text
                yield from self.text.give_back()
                yield from self._bare()
            else:
                yield from self.attempt(self._calls(ENDS[marker]))

    def thought(self, start: str) -> Steps[None]:
        yield from super().thought(start)
        yield from self._bare()

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        def begin(name: str) -> str:
            return f'[{{"name": {json.dumps(name)}, "arguments": '

        return constrained_calls(tools, begin, "}]", ['[{"name": ']) if choice == "auto" else None

    def _bare(self) -> Steps[None]:
        """Read a list at this position, if there is one."""
        self.text.keep()
        yield from self.text.space()
        is_list = (yield from self.text.peek()) == "[" and (yield from self.text.ahead(2)) != "[]"
        if is_list and (yield from self.text.ahead(12)) != "[TOOL_CALLS]":
            yield from self.attempt(self._calls(""))
        else:
            yield from self.text.give_back()

    def _calls(self, end: str) -> Steps[bool]:
        yield from self.text.space()
        if not (yield from read_call_list(self.text, self.calls, stops=STOPS)):
            return False
        self.text.forget()
        if end:
            yield from self.text.closing(end)
        return True
