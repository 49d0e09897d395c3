"""Reasoning of Kimi K2 Thinking: `<think>…</think>`. A section of calls ends the reasoning when the model does not.

Format: the chat template in https://huggingface.co/moonshotai/Kimi-K2-Thinking.
"""

from __future__ import annotations

from pegboard_chat.parsing import SwitchedReasoning


class KimiK2ReasoningParser(SwitchedReasoning):
    stops = ("<|tool_calls_section_begin|>",)
