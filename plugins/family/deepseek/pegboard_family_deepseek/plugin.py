"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

SPECIAL = frozenset({"special_tokens"})
TOOL_PARSER_V3 = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_deepseek.tool_parser:DeepSeekV3ToolParser",
    flags=SPECIAL,
)
TOOL_PARSER_V31 = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_deepseek.tool_parser:DeepSeekV31ToolParser",
    flags=SPECIAL,
)
TOOL_PARSER_V32 = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_deepseek.tags_parser:DeepSeekV32ToolParser",
    flags=SPECIAL,
)
REASONING_PARSER_R1 = OutputParserSpec(
    api="1.0", implementation="pegboard_family_deepseek.reasoning_parser:DeepSeekR1ReasoningParser"
)
REASONING_PARSER_V3 = OutputParserSpec(
    api="1.0", implementation="pegboard_family_deepseek.reasoning_parser:DeepSeekV3ReasoningParser"
)

MODEL_TYPES = frozenset({"deepseek_v3"})
CALLS = "<｜tool▁calls▁begin｜>"

V3 = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    template_markers=(CALLS, "```json"),
    recommends={"tool_parser": "deepseek_v3"},
    chat_template="pegboard_family_deepseek:v3.jinja",
)
R1 = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    template_markers=(CALLS, "```json", "</think>"),
    recommends={"tool_parser": "deepseek_v3", "reasoning_parser": "deepseek_r1"},
    chat_template="pegboard_family_deepseek:v3.jinja",
)
V31 = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    template_markers=(CALLS, "not thinking is defined", "<think>"),
    recommends={"tool_parser": "deepseek_v31", "reasoning_parser": "deepseek_v3"},
    chat_template="pegboard_family_deepseek:v31.jinja",
)
V32 = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"deepseek_v32"}),
    architectures=frozenset({"DeepseekV32ForCausalLM"}),
    recommends={"tool_parser": "deepseek_v32", "reasoning_parser": "deepseek_v3"},
)
DISTILL = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"llama", "qwen2", "qwen3"}),
    template_markers=("<｜Assistant｜>", "</think>"),
    recommends={"reasoning_parser": "deepseek_r1"},
)
