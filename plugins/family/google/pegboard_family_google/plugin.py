"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

TOOL_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_google.tool_parser:FunctionGemmaToolParser",
    flags=frozenset({"special_tokens"}),
)

FUNCTIONGEMMA = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"gemma3_text"}),
    template_markers=("<start_function_call>",),
    recommends={"tool_parser": "functiongemma"},
)
