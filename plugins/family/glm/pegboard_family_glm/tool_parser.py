"""Tool calls of GLM-4.5 and later; from GLM-4.7 on without the line breaks.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

Format: the chat template in https://huggingface.co/zai-org/GLM-4.5. Values are plain text, typed by the tool's schema.
"""

from __future__ import annotations

from pegboard.parsing import Markers, Steps, StreamParser, TagFormat, read_tagged_call

START = Markers("<tool_call>")
TAGS = TagFormat(
    key_start="<arg_key>",
    key_end="</arg_key>",
    value_start="<arg_value>",
    value_end="</arg_value>",
    end="</tool_call>",
    trim="nothing",
)


class GlmToolParser(StreamParser):
    def read(self) -> Steps[None]:
        while (yield from self.prose(START)):
            yield from self.attempt(read_tagged_call(self.text, self.calls, TAGS))
