"""Reasoning of Qwen3, QwQ and Qwen3.5: `<think>…</think>` at the beginning of the output.

https://qwen.readthedocs.io/en/latest/getting_started/concepts.html: with `enable_thinking` off the template closes the
reasoning in the prompt; templates of models that always think open it there. A call ends the reasoning when the model does not.
"""

from __future__ import annotations

from pegboard_chat.parsing import TaggedReasoning


class Qwen3ReasoningParser(TaggedReasoning):
    start = "<think>"
    end = "</think>"
    stops = ("<tool_call>",)

    def begins(self) -> bool:
        return bool(self.setup is None or self.setup.template_kwargs.get("enable_thinking", True))

    def may_open(self) -> bool:
        return self.begins()
