"""Specs of this package. InternLM's own chat templates do not support tools, so the families
include one that does."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

TOOL_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_internlm.tool_parser:InternLMToolParser",
    flags=frozenset({"special_tokens"}),
)

TURN = "<|im_start|>"
TEMPLATE = "pegboard_family_internlm:internlm2.jinja"

INTERNLM_2 = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"internlm2"}),
    architectures=frozenset({"InternLM2ForCausalLM"}),
    template_markers=(TURN,),
    recommends={"tool_parser": "internlm"},
    chat_template=TEMPLATE,
)
INTERNLM_3 = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"internlm3"}),
    architectures=frozenset({"InternLM3ForCausalLM"}),
    template_markers=(TURN,),
    recommends={"tool_parser": "internlm"},
    chat_template=TEMPLATE,
)
