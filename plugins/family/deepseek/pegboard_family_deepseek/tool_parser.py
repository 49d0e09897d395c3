"""Tool calls of DeepSeek V3, R1 and V3.1.

V3, R1    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
          ```json
          {…}
          ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Formats: the chat templates in https://huggingface.co/deepseek-ai/DeepSeek-V3-0324 and
https://huggingface.co/deepseek-ai/DeepSeek-V3.1#toolcall. Several calls follow one another inside
one section.
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
    constrained_calls,
    read_arguments,
)

SECTION = "<｜tool▁calls▁begin｜>"
SECTION_END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
STARTS = Markers(SECTION, CALL)
STOPS = Stops(SECTION, SECTION_END, CALL, CALL_END, SEPARATOR)


class DeepSeekV31ToolParser(StreamParser):
    ends = (SECTION_END, CALL_END, SEPARATOR)
    before = ""
    between = SEPARATOR
    behind = ""  # the text around the name and the arguments of a call

    def read(self) -> Steps[None]:
        while marker := (yield from self.prose(STARTS)):
            yield from self.attempt(self._call(marker))

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        def begin(name: str) -> str:
            return f"{CALL}{self.before}{name}{self.between}"

        return (
            constrained_calls(tools, begin, self.behind + CALL_END, [CALL])
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
        if not (yield from self.body()):
            return False
        self.text.forget()
        yield from self.text.closing(CALL_END)
        yield from self.text.closing(SECTION_END)
        return True

    def body(self) -> Steps[bool]:
        """A call from its name to its arguments."""
        name = yield from self.text.word()
        if not name or not (yield from self.text.accept(SEPARATOR)):
            return False
        yield from self.text.space()
        return (yield from read_arguments(self.text, self.calls, name, stops=STOPS))


class DeepSeekV3ToolParser(DeepSeekV31ToolParser):
    before = "function" + SEPARATOR
    between = "\n```json\n"
    behind = "\n```"

    def body(self) -> Steps[bool]:
        if not (yield from self.text.accept(self.before)):
            return False
        name = yield from self.text.word()
        yield from self.text.space()
        if not name or not (yield from self.text.accept("```json")):
            return False
        yield from self.text.space()
        if not (yield from read_arguments(self.text, self.calls, name, stops=STOPS)):
            return False
        self.text.forget()
        yield from self.text.closing("```")
        return True
