"""Reasoning of Magistral and later: `[THINK]…[/THINK]` (https://docs.mistral.ai/capabilities/reasoning). A call also ends it."""

from __future__ import annotations

from pegboard_chat.parsing import TaggedReasoning


class MistralReasoningParser(TaggedReasoning):
    start = "[THINK]"
    end = "[/THINK]"
    stops = ("[TOOL_CALLS]",)
