"""Reasoning of Olmo 3 Think: `<think>…</think>`, whose start the chat template writes.

Format: the chat template in https://huggingface.co/allenai/Olmo-3-32B-Think. The tags are not
single tokens.
"""

from __future__ import annotations

from pegboard_chat.parsing import TaggedReasoning


class Olmo3ReasoningParser(TaggedReasoning):
    start = "<think>"
    end = "</think>"
    begins_inside = True
