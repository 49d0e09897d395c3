"""Tool calls of Meituan LongCat-Flash: JSON between tags, one call per pair of tags.

    <longcat_tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </longcat_tool_call>

Format: https://huggingface.co/meituan-longcat/LongCat-Flash-Chat#tool-call.
"""

from __future__ import annotations

from pegboard_chat.parsing import JSONToolParser


class LongCatToolParser(JSONToolParser):
    start = "<longcat_tool_call>"
    end = "</longcat_tool_call>"
