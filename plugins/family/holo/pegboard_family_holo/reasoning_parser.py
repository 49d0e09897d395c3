"""Reasoning of Holo2: `…</think>answer`, unless `thinking` is switched off.

https://huggingface.co/Hcompany/Holo2-8B: the template opens the reasoning in the prompt, or closes it with `thinking` off.
"""

from __future__ import annotations

from pegboard_chat.parsing import TaggedReasoning


class Holo2ReasoningParser(TaggedReasoning):
    start = "<think>"
    end = "</think>"

    def begins(self) -> bool:
        switches = self.setup.template_kwargs if self.setup else {}
        given = [switches[key] for key in ("thinking", "enable_thinking") if switches.get(key) is not None]
        return any(given) or not given

    def may_open(self) -> bool:
        return self.begins()
