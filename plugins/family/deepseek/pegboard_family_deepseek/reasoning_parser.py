"""Reasoning of DeepSeek: `<think>…</think>`, opened by the template or by the model, or not opened
at all.

R1 always reasons (https://huggingface.co/deepseek-ai/DeepSeek-R1#usage-recommendations). V3.1 and
later reason when `thinking` is set for the template, which then opens or closes the reasoning in
the prompt (https://huggingface.co/deepseek-ai/DeepSeek-V3.1).
"""

from __future__ import annotations

from pegboard_chat.parsing import SwitchedReasoning, TaggedReasoning


class DeepSeekR1ReasoningParser(TaggedReasoning):
    start = "<think>"
    end = "</think>"
    begins_inside = True


class DeepSeekV3ReasoningParser(SwitchedReasoning):
    begins_inside = False
