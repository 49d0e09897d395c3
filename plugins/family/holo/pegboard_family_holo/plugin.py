"""Specs of this package. Holo2 has the model type of Qwen3-VL and nearly the same template; the
switch `thinking` distinguishes them."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

REASONING_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_holo.reasoning_parser:Holo2ReasoningParser",
    flags=frozenset({"special_tokens"}),
)

HOLO2 = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"qwen3_vl", "qwen3_vl_moe"}),
    template_markers=("<tools>", '{"name": <function-name>', "<think>", "thinking is defined"),
    recommends={"tool_parser": "hermes", "reasoning_parser": "holo2"},
)
