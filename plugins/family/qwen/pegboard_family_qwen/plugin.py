"""Specs of this package. The chat template of a Qwen model, not its model type, shows which parsers
it needs."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

TOOL_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_qwen.tool_parser:Qwen3CoderToolParser",
    flags=frozenset({"special_tokens"}),
)

REASONING_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_qwen.reasoning_parser:Qwen3ReasoningParser"
)

QWEN2 = frozenset({"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni"})
QWEN3 = frozenset(
    {
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_omni_moe",
        "qwen3_5",
        "qwen3_5_moe",
    }
)
JSON_CALLS = ("<tools>", '{"name": <function-name>')
TAG_CALLS = ("<tools>", "<function=", "<parameter=")
THINKS = ("<think>",)

QWEN2_5 = ModelFamilySpec(
    api="1.0", model_types=QWEN2, template_markers=JSON_CALLS, recommends={"tool_parser": "hermes"}
)
QWQ = ModelFamilySpec(
    api="1.0",
    model_types=QWEN2,
    template_markers=JSON_CALLS + THINKS,
    recommends={"tool_parser": "hermes", "reasoning_parser": "qwen3"},
)
QWEN3_INSTRUCT = ModelFamilySpec(
    api="1.0", model_types=QWEN3, template_markers=JSON_CALLS, recommends={"tool_parser": "hermes"}
)
QWEN3_THINKING = ModelFamilySpec(
    api="1.0",
    model_types=QWEN3,
    template_markers=JSON_CALLS + THINKS,
    recommends={"tool_parser": "hermes", "reasoning_parser": "qwen3"},
)
QWEN3_CODER = ModelFamilySpec(
    api="1.0",
    model_types=QWEN3,
    template_markers=TAG_CALLS,
    recommends={"tool_parser": "qwen3_coder"},
)
QWEN3_5 = ModelFamilySpec(
    api="1.0",
    model_types=QWEN3,
    template_markers=TAG_CALLS + THINKS,
    recommends={"tool_parser": "qwen3_coder", "reasoning_parser": "qwen3"},
)
