"""Tool calls of Hermes 2 Pro and later, and of the models that write them in the same way (Qwen2.5,
Qwen3, …).

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Format: https://github.com/NousResearch/Hermes-Function-Calling#prompt-format-for-function-calling.
Each call is a separate element; calls follow one another. The end tag may be missing at the end of
the text, and one element may hold a list of calls.
"""

from __future__ import annotations

from pegboard_chat.parsing import CallKeys, JSONToolParser


class HermesToolParser(JSONToolParser):
    start = "<tool_call>"
    end = "</tool_call>"
    keys = CallKeys(arguments=("arguments", "parameters"), needs_arguments=False)
    takes_lists = True
