"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

TOOL_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_olmo.tool_parser:Olmo3ToolParser"
)
REASONING_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_olmo.reasoning_parser:Olmo3ReasoningParser"
)

MODEL_TYPES = frozenset({"olmo3"})
ARCHITECTURES = frozenset({"Olmo3ForCausalLM"})

OLMO_3 = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    architectures=ARCHITECTURES,
    recommends={"tool_parser": "olmo3"},
)
OLMO_3_THINK = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    architectures=ARCHITECTURES,
    template_markers=("<think>",),
    recommends={"tool_parser": "olmo3", "reasoning_parser": "olmo3"},
)
