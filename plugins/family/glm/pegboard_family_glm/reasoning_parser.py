"""Reasoning of GLM-4.5 and later: `<think>…</think>`, opened by the model or, from GLM-4.7 on, by
the template.

https://huggingface.co/zai-org/GLM-4.5: with `enable_thinking` off the template closes the reasoning
in the prompt. If the model does not end the reasoning, a call ends it.
"""

from __future__ import annotations

from pegboard_chat.parsing import SwitchedReasoning


class GlmReasoningParser(SwitchedReasoning):
    stops = ("<tool_call>",)
