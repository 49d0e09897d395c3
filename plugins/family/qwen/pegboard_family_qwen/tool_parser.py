"""Tool calls of Qwen3-Coder and Qwen3.5.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Format: the chat template in https://huggingface.co/Qwen/Qwen3-Coder-480B-A35B-Instruct. Values are plain text between one newline
on each side; their types are those of the tool's schema. The models leave out <tool_call> or </parameter> now and then.
"""

from __future__ import annotations

from pegboard.parsing import Markers, Steps, StreamParser, TagFormat, read_tagged_call

START, FUNCTION = "<tool_call>", "<function="
END = "</tool_call>"
STARTS = Markers(START, FUNCTION)
TAGS = TagFormat(
    name_end=">",
    key_start="<parameter=",
    key_end=">",
    value_end="</parameter>",
    value_stops=("<parameter=", "</function>"),
    end="</function>",
)


class Qwen3CoderToolParser(StreamParser):
    def read(self) -> Steps[None]:
        while marker := (yield from self.prose(STARTS)):
            yield from self.attempt(self._call(marker))

    def _call(self, marker: str) -> Steps[bool]:
        if marker == START:
            yield from self.text.space()
            if not (yield from self.text.accept(FUNCTION)):
                return False
        if not (yield from read_tagged_call(self.text, self.calls, TAGS)):
            return False
        yield from self.text.closing(END)
        return True
