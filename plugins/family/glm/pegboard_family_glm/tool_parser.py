"""Tool calls of GLM-4.5 and later; from GLM-4.7 on without the line breaks.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

Format: the chat template in https://huggingface.co/zai-org/GLM-4.5. Values are plain text, typed by
the tool's schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing import (
    Markers,
    Steps,
    StreamParser,
    TagFormat,
    constrained_tags,
    read_tagged_call,
)

CALL = "<tool_call>"
START = Markers(CALL)
TAGS = TagFormat(
    key_start="<arg_key>",
    key_end="</arg_key>",
    value_start="<arg_value>",
    value_end="</arg_value>",
    value_stops=("<arg_key>",),
    value_stops_before={"</tool_call>": (CALL,), CALL: ("<arg_key>", "</tool_call>")},
    value_stops_named=(CALL,),
    around=(CALL,),
    end="</tool_call>",
    trim="nothing",
)


class GlmToolParser(StreamParser):
    ends = (TAGS.end, TAGS.key_end, TAGS.value_end)
    tags: ClassVar[TagFormat] = TAGS

    def read(self) -> Steps[None]:
        while (yield from self.prose(START)):
            yield from self.attempt(self._call())

    def constraint(self, tools: Sequence[Mapping[str, Any]], choice: str) -> Constraint | None:
        return constrained_tags(tools, self.tags, [(CALL, CALL)]) if choice == "auto" else None

    def _call(self) -> Steps[bool]:
        yield from self.text.space()
        if (yield from self.text.accept(self.tags.end)):  # an empty element
            return True
        return (yield from read_tagged_call(self.text, self.calls, self.tags))


class Glm47ToolParser(GlmToolParser):
    """The same reader as for the older format. Only the written form differs."""

    tags = replace(TAGS, line="")
