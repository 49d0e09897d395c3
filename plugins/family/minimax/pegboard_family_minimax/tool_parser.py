"""Tool calls of MiniMax.

M1    <tool_calls>
      {"name": "get_weather", "arguments": {"city": "Paris"}}
      {"name": "now", "arguments": {}}
      </tool_calls>
M2    <minimax:tool_call>
      <invoke name="get_weather">
      <parameter name="city">Paris</parameter>
      </invoke>
      </minimax:tool_call>

Formats: https://github.com/MiniMax-AI/MiniMax-M1/blob/main/docs/function_call_guide.md and
https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md. M2's values are
plain text, typed by the tool's schema; one section may hold several calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.output_parser import Content
from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing import (
    CallKeys,
    Markers,
    Steps,
    Stops,
    StreamParser,
    TagFormat,
    TaggedToolParser,
    constrained_calls,
    read_call_object,
)

SECTION = "<tool_calls>"
SECTION_END = "</tool_calls>"
SECTIONS = Markers(SECTION)
STOPS = Stops(before={SECTION_END: (SECTION,), SECTION: ("{",)})
IN_SECTION = Markers("{", SECTION, SECTION_END)
KEYS = CallKeys(needs_arguments=False)


class MiniMaxToolParser(StreamParser):
    ends = (SECTION_END,)

    def read(self) -> Steps[None]:
        while (yield from self.prose(SECTIONS)):
            yield from self.attempt(self._section())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        def begin(name: str) -> str:
            return f'{SECTION}\n{{"name": {json.dumps(name)}, "arguments": '

        return (
            constrained_calls(tools, begin, "}\n" + SECTION_END, [SECTION])
            if choice == "auto"
            else None
        )

    def _section(self) -> Steps[bool]:
        """Calls, one after the other. Text that is not a call is content, up to the next object
        that is one. The end tag may be missing at the end of the text."""
        yield from self.text.space()
        if (yield from self.text.accept(SECTION_END)):
            return True
        if (yield from self.text.peek()) != "{":
            return False
        count = self.calls.count
        is_begun = False
        while True:
            if (
                yield from read_call_object(
                    self.text, self.calls, KEYS, is_begun=is_begun, stops=STOPS
                )
            ):
                self.text.forget()
                yield from self.text.space()
                if (yield from self.text.peek()) == "{":
                    self.text.keep()
                    is_begun = False
                    continue
            else:
                self.calls.abandon()
                yield from self.text.give_back()
            marker = yield from self.text.pieces(IN_SECTION, Content)
            if marker != "{":
                if marker and (marker == SECTION or self.calls.count == count):
                    self.text.put_back(marker)
                return self.calls.count > count
            self.text.keep(marker)
            is_begun = True


class MiniMaxM2ToolParser(TaggedToolParser):
    section = "<minimax:tool_call>"
    section_end = "</minimax:tool_call>"
    opening = '<invoke name="'
    tags = TagFormat(
        name_end='">',
        key_start='<parameter name="',
        key_end='">',
        value_end="</parameter>",
        value_stops=('<parameter name="', "</invoke>"),
        end="</invoke>",
        trim="nothing",
    )
