"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

SPECIAL = frozenset({"special_tokens"})
TOOL_PARSER_M1 = OutputParserSpec(
    api="1.0", implementation="pegboard_family_minimax.tool_parser:MiniMaxToolParser"
)
TOOL_PARSER_M2 = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_minimax.tool_parser:MiniMaxM2ToolParser",
    flags=SPECIAL,
)
REASONING_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_minimax.reasoning_parser:MiniMaxM2ReasoningParser",
    flags=SPECIAL,
)
APPEND_THINK = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_minimax.reasoning_parser:MiniMaxM2AppendThinkReasoningParser",
    flags=SPECIAL,
)

M1 = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"minimax_m1"}),
    architectures=frozenset({"MiniMaxM1ForCausalLM"}),
    recommends={"tool_parser": "minimax", "reasoning_parser": "deepseek_r1"},
    chat_template="pegboard_family_minimax:m1.jinja",
)
M2 = ModelFamilySpec(
    api="1.0",
    architectures=frozenset({"MiniMaxM2ForCausalLM"}),
    template_markers=("<invoke name=", "<think>"),
    recommends={"tool_parser": "minimax_m2", "reasoning_parser": "minimax_m2"},
)
