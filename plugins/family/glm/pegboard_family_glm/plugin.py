"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

SPECIAL = frozenset({"special_tokens"})
TOOL_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_glm.tool_parser:GlmToolParser", flags=SPECIAL
)
GLM47_TOOL_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_glm.tool_parser:Glm47ToolParser", flags=SPECIAL
)
REASONING_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_glm.reasoning_parser:GlmReasoningParser",
    flags=SPECIAL,
)

MODEL_TYPES = frozenset({"glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm46v", "glm_moe_dsa"})
TAGS = ("<arg_key>", "<arg_value>")
GLM = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    template_markers=TAGS,
    recommends={"tool_parser": "glm45", "reasoning_parser": "glm45"},
)
GLM47 = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    template_markers=(*TAGS, "</arg_key><arg_value>"),
    recommends={"tool_parser": "glm47", "reasoning_parser": "glm47"},
)
