"""Tool calls of Hunyuan-A13B.

    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now",
    "arguments": {}}]</tool_calls>

Format: https://huggingface.co/tencent/Hunyuan-A13B-Instruct, and the guide to function calls that
it links to.
"""

from __future__ import annotations

from pegboard_chat.parsing import JSONToolParser


class HunyuanToolParser(JSONToolParser):
    start = "<tool_calls>"
    end = "</tool_calls>"
    takes_lists = True
    brackets = ("[", "]")
