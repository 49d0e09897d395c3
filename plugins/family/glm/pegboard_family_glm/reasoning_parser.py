"""Reasoning of GLM-4.5 and later: `<think>…</think>`, opened by the model or, from GLM-4.7 on, by the template.

https://huggingface.co/zai-org/GLM-4.5: with `enable_thinking` off the template closes the reasoning in the prompt. A call ends
the reasoning when the model does not.
"""

from __future__ import annotations

from pegboard_chat.parsing import SwitchedReasoning


class GlmReasoningParser(SwitchedReasoning):
    stops = ("<tool_call>",)
