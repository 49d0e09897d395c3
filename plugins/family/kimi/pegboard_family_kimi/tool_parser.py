"""Tool calls of Kimi K2.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city":
    "Paris"} <|tool_call_end|><|tool_calls_section_end|>

Format: https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md. The
text before the arguments is the id of the call, and the model expects to see it again in the tool's
answer. Some models write only the number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing import Markers, Steps, Stops, StreamParser, read_arguments, take_json
from pegboard_chat.parsing.call_constraint import call_bodies
from pegboard_chat.parsing.structural_tag import (
    Format,
    constraint,
    either,
    regex,
    sequence,
    text,
    triggered,
)

SECTION = "<|tool_calls_section_begin|>"
SECTION_END = "<|tool_calls_section_end|>"
CALL = "<|tool_call_begin|>"
CALL_END = "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
STARTS = Markers(SECTION, CALL, SECTION_END)
STOPS = Stops(SECTION, SECTION_END, CALL, CALL_END, ARGUMENTS)
ID = re.compile(r"(?:functions\.)?([^:]+):[0-9]+")


class KimiK2ToolParser(StreamParser):
    ends = (CALL_END, ARGUMENTS)

    def call_id(self, index: int, name: str) -> str:
        return f"functions.{name}:{index}"

    def read(self) -> Steps[None]:
        while marker := (yield from self.prose(STARTS)):
            yield from self.attempt(self._end() if marker == SECTION_END else self._call(marker))

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        if not tools or choice != "auto":
            return None
        number = regex("0|[1-9][0-9]{0,3}")

        def before(name: str) -> Format:
            return sequence(text(f"functions.{name}:"), number, text(ARGUMENTS))

        calls = call_bodies(tools, before, CALL_END, may_be_empty=True)
        beginnings = [SECTION + CALL, CALL]
        return constraint(
            triggered([SECTION, CALL], [(begin, either(*calls), "") for begin in beginnings])
        )

    def _end(self) -> Steps[bool]:
        """Return whether the end of a section is dropped. It is text without a call before it, or
        after text that was given back."""
        yield from ()
        return self.calls.count > 0 and not self._is_text(SECTION_END)

    def _call(self, marker: str) -> Steps[bool]:
        if marker == SECTION:
            yield from self.text.space()
            if (yield from self.text.accept(SECTION_END)):
                return True
            if not (yield from self.text.accept(CALL)):
                return False
        yield from self.text.space()
        id = yield from self.text.word()
        yield from self.text.space()
        if not (yield from self.text.accept(ARGUMENTS)):
            return False
        yield from self.text.space()
        if (name := self._name(id)) is not None and (yield from self.text.accept(CALL_END)):
            yield from self.calls.whole(name, "{}", id)
        elif name is not None and (
            yield from read_arguments(self.text, self.calls, name, id, stops=STOPS)
        ):
            self.text.forget()
            yield from self.text.closing(CALL_END)
        elif name is None and id.isdecimal() and (yield from self._by_arguments(id)):
            yield from self.text.closing(CALL_END)
        else:
            return False
        self.text.forget()
        yield from self.text.closing(SECTION_END)
        return True

    def _name(self, id: str) -> str | None:
        """Return the name of the tool that an id calls. A bare number calls the request's only
        tool."""
        match = ID.fullmatch(id)
        if match is not None:
            return match[1]
        names = self.calls.tool_names()
        return names[0] if id.isdecimal() and len(names) == 1 else None

    def _by_arguments(self, id: str) -> Steps[bool]:
        """Read a call whose id is only a number: it is a call of the one tool that has all the
        arguments."""
        if (yield from self.text.peek()) != "{" or (
            arguments := (yield from take_json(self.text, STOPS))
        ) is None:
            return False
        try:
            keys = json.loads(arguments).keys()
        except RecursionError:
            return False
        fitting = [name for name in self.calls.tool_names() if keys and self._takes(name, keys)]
        if len(fitting) != 1:
            return False
        yield from self.calls.whole(fitting[0], arguments, id)
        return True

    def _takes(self, name: str, keys: Set[str]) -> bool:
        properties = self.calls.parameters(name).get("properties")
        return isinstance(properties, Mapping) and keys <= properties.keys()
