"""Reasoning of Kimi K2 Thinking: `<think>…</think>`. If the model does not end the reasoning, a
section of calls ends it.

Format: the chat template in https://huggingface.co/moonshotai/Kimi-K2-Thinking.
"""

from __future__ import annotations

from pegboard_chat.parsing import SwitchedReasoning


class KimiK2ReasoningParser(SwitchedReasoning):
    stops = ("<|tool_calls_section_begin|>",)
