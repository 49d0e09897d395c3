"""Reasoning of GLM-4.5 and later: `<think>…</think>`, opened by the model or, from GLM-4.7 on, by the template.

https://huggingface.co/zai-org/GLM-4.5: with `enable_thinking` off the template closes the reasoning in the prompt. A call ends
the reasoning when the model does not.
"""

from __future__ import annotations

from pegboard_chat.parsing import TaggedReasoning


class GlmReasoningParser(TaggedReasoning):
    start = "<think>"
    end = "</think>"
    stops = ("<tool_call>",)

    def begins(self) -> bool:
        switches = self.setup.template_kwargs if self.setup else {}
        given = [switches[key] for key in ("thinking", "enable_thinking") if switches.get(key) is not None]
        return any(given) or not given

    def may_open(self) -> bool:
        return self.begins()
