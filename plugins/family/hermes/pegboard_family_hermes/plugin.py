"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

TOOL_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_hermes.tool_parser:HermesToolParser",
    flags=frozenset({"special_tokens"}),  # in some vocabularies <tool_call> is a special token
)

FAMILY = ModelFamilySpec(
    api="1.0",
    architectures=frozenset({"LlamaForCausalLM", "MistralForCausalLM"}),
    template_markers=("<tools>", "<tool_call>"),
    recommends={"tool_parser": "hermes"},
)
