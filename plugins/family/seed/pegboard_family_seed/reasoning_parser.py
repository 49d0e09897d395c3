"""Reasoning of Seed-OSS: `<seed:think>…</seed:think>`, with remarks on the thinking budget inside, which are reasoning too.

https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct: with a `thinking_budget` of 0 the template closes the reasoning in
the prompt. A call ends it when the model forgets to.
"""

from __future__ import annotations

from pegboard_chat.parsing import TaggedReasoning


class SeedOssReasoningParser(TaggedReasoning):
    start = "<seed:think>"
    end = "</seed:think>"
    stops = ("<seed:tool_call>",)
    begins_inside = True
