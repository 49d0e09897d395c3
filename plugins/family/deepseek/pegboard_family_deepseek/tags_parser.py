"""Tool calls of DeepSeek V3.2.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

Format: `encoding/` in https://huggingface.co/deepseek-ai/DeepSeek-V3.2. A value is either a plain
string or JSON.
"""

from __future__ import annotations

from pegboard_chat.parsing import TagFormat, TaggedToolParser


class DeepSeekV32ToolParser(TaggedToolParser):
    section = "<｜DSML｜function_calls>"
    section_end = "</｜DSML｜function_calls>"
    opening = '<｜DSML｜invoke name="'
    tags = TagFormat(
        name_end='">',
        key_start='<｜DSML｜parameter name="',
        key_end='">',
        string_key_ends=('" string="true">',),
        json_key_ends=('" string="false">',),
        value_end="</｜DSML｜parameter>",
        value_stops=('<｜DSML｜parameter name="', "</｜DSML｜invoke>", '<｜DSML｜invoke name="'),
        end="</｜DSML｜invoke>",
        trim="nothing",
    )
