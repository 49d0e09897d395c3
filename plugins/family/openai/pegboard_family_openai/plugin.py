"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

SPECIAL = frozenset({"special_tokens"})
TOOL_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_openai.harmony:HarmonyToolParser", flags=SPECIAL
)
REASONING_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_openai.harmony:HarmonyReasoningParser", flags=SPECIAL
)

GPT_OSS = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"gpt_oss"}),
    architectures=frozenset({"GptOssForCausalLM"}),
    recommends={"tool_parser": "openai", "reasoning_parser": "openai_gptoss"},
)
