"""Reasoning of Qwen3, QwQ and Qwen3.5: `<think>…</think>` at the beginning of the output.

https://qwen.readthedocs.io/en/latest/getting_started/concepts.html: with `enable_thinking` off the
template closes the reasoning in the prompt; templates of models that always think open it there. If
the model does not end the reasoning, a call ends it.
"""

from __future__ import annotations

from pegboard_chat.parsing import SwitchedReasoning


class Qwen3ReasoningParser(SwitchedReasoning):
    stops = ("<tool_call>",)
    switches = ("enable_thinking",)
