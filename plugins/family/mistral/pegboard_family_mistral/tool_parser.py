"""Tool calls of Mistral.

up to v7     [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now",
"arguments": {}}] v11          [TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city":
"Paris"}[TOOL_CALLS]now[CALL_ID]… from v13 on  [TOOL_CALLS]get_weather[ARGS]{"city":
"Paris"}[TOOL_CALLS]now[ARGS]{}

Formats: https://docs.mistral.ai/capabilities/function_calling and the tokenizer versions in
https://github.com/mistralai/mistral-common. Where the text does not keep control tokens, [ARGS] is
missing. Mistral's templates require ids of nine letters and digits.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing import (
    CallKeys,
    Calls,
    Markers,
    Steps,
    Stops,
    StreamParser,
    read_arguments,
    read_call_list,
)
from pegboard_chat.parsing.call_constraint import call_bodies, call_list
from pegboard_chat.parsing.structural_tag import (
    constraint,
    either,
    regex,
    sequence,
    text,
    triggered,
)

START = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
STARTS = Markers(START)
STOPS = Stops(START, CALL_ID, ARGUMENTS)
KEYS = CallKeys(needs_arguments=False)
ID = re.compile(r"[a-zA-Z0-9]*")
ID_LENGTH = 9


class MistralCalls(Calls):
    """Calls whose ids Mistral's templates accept."""

    def fresh_id(self, index: int, name: str) -> str:
        return "".join(random.choices(string.ascii_letters + string.digits, k=ID_LENGTH))


class MistralToolParser(StreamParser):
    ends = (CALL_ID, ARGUMENTS)
    thoughts: ClassVar[Mapping[str, str]] = {"[THINK]": "[/THINK]", "<think>": "</think>"}

    def __init__(self, options: object = None, setup: OutputParserSetup | None = None) -> None:
        super().__init__(options, setup)
        self.calls = MistralCalls(setup.tools if setup else ())

    def read(self) -> Steps[None]:
        while (yield from self.prose(STARTS)):
            yield from self.attempt(self._call())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        if not tools or choice != "auto":
            return None
        id = sequence(text(CALL_ID), regex(f"[a-zA-Z0-9]{{{ID_LENGTH}}}"), text(ARGUMENTS))
        newest = call_bodies(tools, lambda name: text(f"{name}{ARGUMENTS}"))
        with_id = call_bodies(tools, lambda name: sequence(text(name), id))
        tags = [(START, either(*newest, *with_id), ""), (f"{START}[", call_list(tools), "]")]
        return constraint(triggered([START], tags))

    def _call(self) -> Steps[bool]:
        yield from self.text.space()
        if (yield from self.text.peek()) == "[":
            return (yield from read_call_list(self.text, self.calls, KEYS, stops=STOPS))
        name = yield from self.text.word()
        id = ""
        if not name:
            return False
        if (yield from self.text.accept(CALL_ID)):
            id = yield from self.text.word(ID)
            if not id:
                return False
        yield from self.text.accept(ARGUMENTS)
        yield from self.text.space()
        return (yield from read_arguments(self.text, self.calls, name, id, stops=STOPS))
