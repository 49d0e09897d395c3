"""Tool calls of DeepSeek V3.2.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

Format: `encoding/` in https://huggingface.co/deepseek-ai/DeepSeek-V3.2. A value is a string as it stands, or JSON.
"""

from __future__ import annotations

from pegboard.parsing import Markers, Steps, StreamParser, TagFormat, read_tagged_call

SECTION, SECTION_END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
INVOKE = '<｜DSML｜invoke name="'
STARTS = Markers(SECTION, INVOKE)
TAGS = TagFormat(
    name_end='">',
    key_start='<｜DSML｜parameter name="',
    key_end='">',
    string_key_ends=('" string="true">',),
    json_key_ends=('" string="false">',),
    value_end="</｜DSML｜parameter>",
    end="</｜DSML｜invoke>",
    trim="nothing",
)


class DeepSeekV32ToolParser(StreamParser):
    def read(self) -> Steps[None]:
        while marker := (yield from self.prose(STARTS)):
            yield from self.attempt(self._call(marker))

    def _call(self, marker: str) -> Steps[bool]:
        if marker == SECTION:
            yield from self.text.space()
            if not (yield from self.text.accept(INVOKE)):
                return False
        if not (yield from read_tagged_call(self.text, self.calls, TAGS)):
            return False
        yield from self.text.closing(SECTION_END)
        return True
