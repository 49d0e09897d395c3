"""Tool calls of Qwen3-Coder and Qwen3.5.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Format: the chat template in https://huggingface.co/Qwen/Qwen3-Coder-480B-A35B-Instruct. Values are
plain text with one newline on each side; the tool's schema gives their types. The models sometimes
leave out <tool_call> or </parameter>.
"""

from __future__ import annotations

from pegboard_chat.parsing import TagFormat, TaggedToolParser


class Qwen3CoderToolParser(TaggedToolParser):
    section = "<tool_call>"
    section_end = "</tool_call>"
    opening = "<function="
    is_quotable = True
    tags = TagFormat(
        name_end=">",
        key_start="<parameter=",
        key_end=">",
        value_end="</parameter>",
        value_stops=("<parameter=", "</function>"),
        end="</function>",
        pad="\n",
    )
