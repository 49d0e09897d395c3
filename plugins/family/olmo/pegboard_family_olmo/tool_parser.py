"""Tool calls of Olmo 3: Python calls, one per line, between tags.

    <function_calls>
    get_weather(city="Paris")
    add(a=2, b=40)
    </function_calls>

Format: the chat template in https://huggingface.co/allenai/Olmo-3-7B-Instruct. Values are Python or
JSON literals.
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
    constrained_python_lines,
    read_python_call,
)

BEGIN = "<function_calls>"
START = Markers(BEGIN)
END = "</function_calls>"
STOPS = Stops(before={END: (BEGIN,), BEGIN: ("(",)}, named=(BEGIN,))


class Olmo3ToolParser(StreamParser):
    ends = (END,)

    def read(self) -> Steps[None]:
        while (yield from self.prose(START)):
            yield from self.attempt(self._calls())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        return constrained_python_lines(tools, BEGIN, END) if choice == "auto" else None

    def _calls(self) -> Steps[bool]:
        """Calls. The end tag may be missing at the end of the text."""
        yield from self.text.space()
        if (yield from self.text.accept(END)):
            return True
        while True:
            yield from self.text.space()
            if not (yield from read_python_call(self.text, self.calls, STOPS)):
                return False
            yield from self.text.space()
            if (yield from self.text.accept(END)) or self.text.is_at_end():
                return True
            yield from self.text.accept(",")
