"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

SPECIAL = frozenset({"special_tokens"})
TOOL_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_step.tool_parser:Step3ToolParser", flags=SPECIAL
)
REASONING_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_step.reasoning_parser:Step3ReasoningParser",
    flags=SPECIAL,
)

STEP3 = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"step3_vl", "step3_text"}),
    recommends={"tool_parser": "step3", "reasoning_parser": "step3"},
)
