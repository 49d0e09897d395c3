"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

SPECIAL = frozenset({"special_tokens"})
TOOL_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_hunyuan.tool_parser:HunyuanToolParser", flags=SPECIAL
)
REASONING_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_hunyuan.reasoning_parser:HunyuanReasoningParser",
    flags=SPECIAL,
)

A13B = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"hunyuan", "hunyuan_v1_moe"}),
    architectures=frozenset({"HunYuanMoEV1ForCausalLM"}),
    recommends={"tool_parser": "hunyuan_a13b", "reasoning_parser": "hunyuan_a13b"},
    chat_template="pegboard_family_hunyuan:a13b.jinja",
)
