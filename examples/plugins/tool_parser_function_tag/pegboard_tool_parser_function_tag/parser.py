"""Tool calls whose tag has the name and whose content is the arguments:

<function=get_weather>{"city": "Paris"}</function>
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

START = "<function="
END = "</function>"
STARTS = Markers(START)
STOPS = Stops(before={END: (START,), START: ()})


class FunctionTagToolParser(StreamParser):
    ends = (END,)

    def read(self) -> Steps[None]:
        """Stream text up to the next tag, then try to read a call. What is not a call stays
        text."""
        while (yield from self.prose(STARTS)):
            yield from self.attempt(self._call())

    def _call(self) -> Steps[bool]:
        name = yield from self.text.word()
        if not name or not (yield from self.text.accept(">")):
            return False
        yield from self.text.space()
        if not (yield from read_arguments(self.text, self.calls, name, stops=STOPS)):
            return False
        self.text.forget()
        yield from self.text.closing(END)
        return True

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        """Let a grammar enforce the form: after START, nothing but a whole call can follow."""
        return (
            constrained_calls(tools, lambda name: f"{START}{name}>", END, [START])
            if choice == "auto"
            else None
        )
