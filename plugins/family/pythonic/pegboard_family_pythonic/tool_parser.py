"""Tool calls as a Python list of calls, which is the whole output.

    [get_weather(city="Paris"), add(a=2, b=40)]

Formats: https://huggingface.co/Team-ACE/ToolACE-8B and
https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_2/#-tool-calling-(1b/3b)-. Values
are Python or JSON literals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing import Steps, StreamParser, constrained_python_lists, read_python_calls


class PythonicToolParser(StreamParser):
    def read(self) -> Steps[None]:
        yield from self.prompted_thought()
        self.text.keep()
        yield from self.text.space()
        while (yield from self.text.peek()) == "[":
            if not (yield from self.attempt(read_python_calls(self.text, self.calls))):
                return
            self.text.keep()
            yield from self.text.space()
        yield from self.text.give_back()

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        return constrained_python_lists(tools) if choice == "auto" else None
