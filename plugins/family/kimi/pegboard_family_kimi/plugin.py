"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

SPECIAL = frozenset({"special_tokens"})
TOOL_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_kimi.tool_parser:KimiK2ToolParser", flags=SPECIAL
)
REASONING_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_kimi.reasoning_parser:KimiK2ReasoningParser",
    flags=SPECIAL,
)

MODEL_TYPES = frozenset({"kimi_k2"})
CALLS = "<|tool_calls_section_begin|>"

KIMI_K2 = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    template_markers=(CALLS,),
    recommends={"tool_parser": "kimi_k2"},
)
KIMI_K2_THINKING = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    template_markers=(CALLS, "<think>"),
    recommends={"tool_parser": "kimi_k2", "reasoning_parser": "kimi_k2"},
)
