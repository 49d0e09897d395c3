"""Reasoning of Step3, which the template opens in the prompt: `…</think>answer`
(https://huggingface.co/stepfun-ai/step3)."""

from __future__ import annotations

from pegboard_chat.parsing import TaggedReasoning


class Step3ReasoningParser(TaggedReasoning):
    start = "<think>"
    end = "</think>"
    begins_inside = True
