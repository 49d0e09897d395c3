"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

TOOL_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_longcat.tool_parser:LongCatToolParser",
    flags=frozenset({"special_tokens"}),
)

FAMILY = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"longcat_flash"}),
    architectures=frozenset({"LongcatFlashForCausalLM"}),
    template_markers=("<longcat_tool_call>",),
    recommends={"tool_parser": "longcat"},
)
