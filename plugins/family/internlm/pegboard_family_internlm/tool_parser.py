"""Tool calls of InternLM 2 and later: JSON between special tokens.

    I will look.<|action_start|><|plugin|>
    {"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>

Format: https://github.com/InternLM/InternLM/blob/main/chat/chat_format.md#complete-chat-format.
Code for the interpreter is also written between such tokens; it is content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing import (
    CallKeys,
    Markers,
    Steps,
    Stops,
    StreamParser,
    constrained_calls,
    read_call_object,
)

START = Markers("<|action_start|>")
PLUGIN = "<|plugin|>"
END = "<|action_end|>"
STOPS = Stops("<|action_start|>", PLUGIN, END)
KEYS = CallKeys(arguments=("parameters", "arguments"), needs_arguments=False)


class InternLMToolParser(StreamParser):
    ends = (PLUGIN, END)

    def read(self) -> Steps[None]:
        while (yield from self.prose(START)):
            yield from self.attempt(self._call())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        def begin(name: str) -> str:
            return f'<|action_start|><|plugin|>\n{{"name": {json.dumps(name)}, "parameters": '

        return (
            constrained_calls(tools, begin, "}<|action_end|>", ["<|action_start|><|plugin|>"])
            if choice == "auto"
            else None
        )

    def _call(self) -> Steps[bool]:
        yield from self.text.space()
        is_plugin = bool((yield from self.text.accept(PLUGIN)))
        yield from self.text.space()
        if (yield from self.text.accept(END)):  # an empty element
            return True
        if not is_plugin:
            return False
        if not (yield from read_call_object(self.text, self.calls, KEYS, stops=STOPS)):
            return False
        self.text.forget()
        yield from self.text.closing(END)
        return True
