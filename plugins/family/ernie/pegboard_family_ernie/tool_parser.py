"""Tool calls of ERNIE 4.5 Thinking.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Format: the chat template in https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-Thinking. Each call is a
separate element; calls follow one another.
"""

from __future__ import annotations

from pegboard_chat.parsing import JSONToolParser


class Ernie45ToolParser(JSONToolParser):
    start = "<tool_call>"
    end = "</tool_call>"
