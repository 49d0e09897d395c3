"""Reasoning of Kimi K2 Thinking: `<think>…</think>`. A section of calls ends the reasoning when the model does not.

Format: the chat template in https://huggingface.co/moonshotai/Kimi-K2-Thinking.
"""

from __future__ import annotations

from pegboard_chat.parsing import TaggedReasoning


class KimiK2ReasoningParser(TaggedReasoning):
    start = "<think>"
    end = "</think>"
    stops = ("<|tool_calls_section_begin|>",)

    def begins(self) -> bool:
        switches = self.setup.template_kwargs if self.setup else {}
        given = [switches[key] for key in ("thinking", "enable_thinking") if switches.get(key) is not None]
        return any(given) or not given

    def may_open(self) -> bool:
        return self.begins()
