"""Reasoning of Magistral and later: `[THINK]…[/THINK]` (https://docs.mistral.ai/capabilities/reasoning). A call ends it too."""

from __future__ import annotations

from pegboard_chat.parsing import TaggedReasoning


class MistralReasoningParser(TaggedReasoning):
    start = "[THINK]"
    end = "[/THINK]"
    stops = ("[TOOL_CALLS]",)
