"""Tool calls of Step3.

    <｜tool_calls_begin｜>
    <｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">
    <steptml:parameter name="city">Paris</steptml:parameter>
    </steptml:invoke><｜tool_call_end｜>
    <｜tool_calls_end｜>

Format: the chat template in https://huggingface.co/stepfun-ai/step3. Values are plain text, typed
by the tool's schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing import (
    Markers,
    Steps,
    StreamParser,
    TagFormat,
    constrained_tags,
    read_tagged_call,
)

SECTION = "<｜tool_calls_begin｜>"
SECTION_END = "<｜tool_calls_end｜>"
CALL = "<｜tool_call_begin｜>"
CALL_END = "<｜tool_call_end｜>"
SEPARATOR = "<｜tool_sep｜>"
KIND = f"function{SEPARATOR}"
INVOKE = '<steptml:invoke name="'
STARTS = Markers(SECTION, CALL)
TAGS = TagFormat(
    name_end='">',
    key_start='<steptml:parameter name="',
    key_end='">',
    value_end="</steptml:parameter>",
    value_stops=(
        '<steptml:parameter name="',
        "</steptml:invoke>",
        SECTION,
        SECTION_END,
        CALL,
        CALL_END,
    ),
    end="</steptml:invoke>",
    around=(SECTION, SECTION_END, CALL, CALL_END),
    trim="nothing",
)


class Step3ToolParser(StreamParser):
    ends = (SECTION_END, CALL_END, SEPARATOR)

    def read(self) -> Steps[None]:
        while marker := (yield from self.prose(STARTS)):
            yield from self.attempt(self._call(marker))

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        call = f"{CALL}{KIND}{INVOKE}"
        openings = [(SECTION, f"{SECTION}\n{call}"), (CALL, call)]
        return (
            constrained_tags(tools, TAGS, openings, f"{TAGS.end}{CALL_END}")
            if choice == "auto"
            else None
        )

    def _call(self, marker: str) -> Steps[bool]:
        if marker == SECTION:
            yield from self.text.space()
            if (yield from self.text.accept(SECTION_END)):
                return True
            if not (yield from self.text.accept(CALL)):
                return False
        yield from self.text.space()
        yield from self.text.accept(KIND, SEPARATOR)  # models sometimes omit it
        yield from self.text.space()
        if not (yield from self.text.accept(INVOKE)):
            return False
        if not (yield from read_tagged_call(self.text, self.calls, TAGS)):
            return False
        yield from self.text.closing(CALL_END)
        yield from self.text.closing(SECTION_END)
        return True
