"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

SPECIAL = frozenset({"special_tokens"})
TOOL_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_granite.tool_parser:GraniteToolParser", flags=SPECIAL
)
TOOL_PARSER_20B = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_granite.tool_parser:Granite20bFCToolParser",
    flags=SPECIAL,
)
REASONING_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_granite.reasoning_parser:GraniteReasoningParser"
)

MODEL_TYPES = frozenset({"granite", "granitemoe", "granitemoeshared", "granitemoehybrid"})

GRANITE_3 = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    template_markers=("<|tool_call|>",),
    recommends={"tool_parser": "granite", "reasoning_parser": "granite"},
)
GRANITE_4 = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    template_markers=("<tools>", "<tool_call>"),
    recommends={"tool_parser": "hermes"},
)
GRANITE_20B = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"gpt_bigcode"}),
    architectures=frozenset({"GPTBigCodeForCausalLM"}),
    template_markers=("<function_call>",),
    recommends={"tool_parser": "granite-20b-fc"},
)
