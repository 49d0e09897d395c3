"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

SPECIAL = frozenset({"special_tokens"})
TOOL_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_ernie.tool_parser:Ernie45ToolParser", flags=SPECIAL
)
REASONING_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_ernie.reasoning_parser:Ernie45ReasoningParser",
    flags=SPECIAL,
)

THINKING = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"ernie4_5", "ernie4_5_moe", "ernie4_5_moe_vl", "ernie4_5_vl_moe"}),
    template_markers=("<think>", "<tool_call>"),
    recommends={"tool_parser": "ernie45", "reasoning_parser": "ernie45"},
)
