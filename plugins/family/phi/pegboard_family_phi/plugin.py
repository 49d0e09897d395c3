"""Specs of this package. Phi-4-mini's own chat template accepts tools only in its own form, so the
family includes another template."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

TOOL_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_phi.tool_parser:Phi4MiniToolParser",
    flags=frozenset({"special_tokens"}),
)

PHI_4_MINI = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"phi3", "phi4mm", "phi4_multimodal"}),
    architectures=frozenset({"Phi3ForCausalLM", "Phi4MMForCausalLM", "Phi4MultimodalForCausalLM"}),
    template_markers=("<|tool|>",),
    recommends={"tool_parser": "phi4_mini_json"},
    chat_template="pegboard_family_phi:phi4_mini.jinja",
)
