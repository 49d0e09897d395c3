"""Tool calls of Seed-OSS.

    <seed:tool_call>
    <function=get_weather>
    <parameter=city>Paris</parameter>
    </function>
    </seed:tool_call>

Format: the chat template in https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct. Values are plain text, with or without a
newline on each side, typed by the tool's schema.
"""

from __future__ import annotations

from pegboard.parsing import Markers, Steps, StreamParser, TagFormat, read_tagged_call

START, END, FUNCTION = "<seed:tool_call>", "</seed:tool_call>", "<function="
STARTS = Markers(START, FUNCTION)
TAGS = TagFormat(
    name_end=">",
    key_start="<parameter=",
    key_end=">",
    value_end="</parameter>",
    value_stops=("<parameter=", "</function>"),
    end="</function>",
)


class SeedOssToolParser(StreamParser):
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
