"""Tool calls of Meta Llama 3 and 4.

llama3_json, llama4_json   {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": …}
llama4_pythonic            [get_weather(city="Paris"), add(a=2, b=40)]

Formats: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling
and
https://www.llama.com/docs/model-cards-and-prompt-formats/llama4/#zero-shot-function-calling---system-message.
A special token may precede the calls: <|python_tag|> (3), or <|python_start|> with <|python_end|>
after them (4).
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
    constrained_python_lists,
    read_call_object,
    read_python_calls,
)

OBJECT_STARTS = Markers("<|python_tag|>", "<|python_start|>", "{")
START = "<|python_start|>"
LIST_START = Markers(START)
END = "<|python_end|>"
STOPS = Stops("<|python_tag|>", START, END)


class LlamaJsonToolParser(StreamParser):
    """Every object that has the form of a call is read as a call, because only its keys distinguish
    it from other JSON."""

    ends = (END,)

    def read(self) -> Steps[None]:
        while marker := (yield from self.prose(OBJECT_STARTS)):
            yield from self.attempt(self._calls(is_begun=marker == "{"))

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        def begin(name: str) -> str:
            return f'{{"name": {json.dumps(name)}, "parameters": '

        return constrained_calls(tools, begin, "}", ['{"name": ']) if choice == "auto" else None

    def _calls(self, is_begun: bool) -> Steps[bool]:
        """Calls with semicolons between them. A semicolon without a call after it is content."""
        if not is_begun:
            yield from self.text.space()
        while (yield from read_call_object(self.text, self.calls, is_begun=is_begun, stops=STOPS)):
            self.text.forget()
            yield from self.text.closing(END)
            self.text.keep()
            if not (yield from self.text.accept(";")):
                return True
            yield from self.text.space()
            is_begun = False
        return False


class Llama4PythonicToolParser(StreamParser):
    """A list of calls at the beginning of the text, or anywhere after its marker."""

    ends = (END,)

    def read(self) -> Steps[None]:
        yield from self.prompted_thought()
        self.text.keep()
        yield from self.text.space()
        if (yield from self.text.peek()) == "[":
            yield from self.attempt(self._calls())
        else:
            yield from self.text.give_back()
        while (yield from self.prose(LIST_START)):
            yield from self.attempt(self._calls())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        return constrained_python_lists(tools, START, END) if choice == "auto" else None

    def _calls(self) -> Steps[bool]:
        yield from self.text.space()
        if not (yield from read_python_calls(self.text, self.calls, STOPS)):
            return False
        self.text.forget()
        yield from self.text.closing(END)
        return True
