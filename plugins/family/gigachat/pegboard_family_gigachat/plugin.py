"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

TOOL_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_gigachat.tool_parser:GigaChat3ToolParser",
    flags=frozenset({"special_tokens"}),
)

FAMILY = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"deepseek_v3"}),  # GigaChat 3 has this architecture
    architectures=frozenset({"DeepseekV3ForCausalLM"}),
    template_markers=("<|role_sep|>", "<|message_sep|>"),
    recommends={"tool_parser": "gigachat3"},
)
