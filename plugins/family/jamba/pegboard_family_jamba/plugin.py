"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

TOOL_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_jamba.tool_parser:JambaToolParser",
    flags=frozenset({"special_tokens"}),
)

FAMILY = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"jamba"}),
    architectures=frozenset({"JambaForCausalLM"}),
    template_markers=("tool_calls",),  # the template of the first Jamba has no tools
    recommends={"tool_parser": "jamba"},
)
