"""Reasoning of Seed-OSS: `<seed:think>…</seed:think>`, which may contain remarks on the thinking
budget; these are also reasoning.

https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct: with a `thinking_budget` of 0 the
template closes the reasoning in the prompt. If the model does not end the reasoning, a call ends
it.
"""

from __future__ import annotations

from pegboard_chat.parsing import TaggedReasoning


class SeedOssReasoningParser(TaggedReasoning):
    start = "<seed:think>"
    end = "</seed:think>"
    stops = ("<seed:tool_call>",)
    begins_inside = True
