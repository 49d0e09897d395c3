"""Specs of this package. xLAM 2 is based on Llama and on Qwen; its chat template names
Salesforce."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

TOOL_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_xlam.tool_parser:XlamToolParser",
    flags=frozenset({"special_tokens"}),
)

FAMILY = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"llama", "qwen2"}),
    architectures=frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM"}),
    template_markers=("Salesforce xLAM", "tools"),
    recommends={"tool_parser": "xlam"},
)
