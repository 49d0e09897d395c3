"""Specs of this package. The format belongs to no vendor: the prompts of ToolACE, Llama 3.2 and
others describe it."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

TOOL_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_pythonic.tool_parser:PythonicToolParser"
)

FAMILY = ModelFamilySpec(
    api="1.0",
    template_markers=("[func_name1(params_name1=params_value1",),
    recommends={"tool_parser": "pythonic"},
)
