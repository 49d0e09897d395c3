"""Tool calls of Seed-OSS.

    <seed:tool_call>
    <function=get_weather>
    <parameter=city>Paris</parameter>
    </function>
    </seed:tool_call>

Format: the chat template in https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct. Values are
plain text, with or without a newline on each side, typed by the tool's schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pegboard_chat.parsing import TagFormat, TaggedToolParser


class SeedOssToolParser(TaggedToolParser):
    section = "<seed:tool_call>"
    section_end = "</seed:tool_call>"
    opening = "<function="
    thoughts: ClassVar[Mapping[str, str]] = {"<seed:think>": "</seed:think>", "<think>": "</think>"}
    tags = TagFormat(
        name_end=">",
        key_start="<parameter=",
        key_end=">",
        value_end="</parameter>",
        value_stops=("<parameter=", "</function>"),
        end="</function>",
    )
