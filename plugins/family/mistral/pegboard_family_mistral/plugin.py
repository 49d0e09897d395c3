"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

SPECIAL = frozenset({"special_tokens"})
TOOL_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_mistral.tool_parser:MistralToolParser", flags=SPECIAL
)
REASONING_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_mistral.reasoning_parser:MistralReasoningParser",
    flags=SPECIAL,
)

MODEL_TYPES = frozenset({"mistral", "mixtral", "mistral3", "ministral3", "pixtral", "voxtral"})
MISTRAL = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    template_markers=("[TOOL_CALLS]",),
    recommends={"tool_parser": "mistral"},
)
MAGISTRAL = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    template_markers=("[TOOL_CALLS]", "[THINK]"),
    recommends={"tool_parser": "mistral", "reasoning_parser": "mistral"},
)

# Checkpoints with Mistral's own tokenizer file. The architecture gives them one match more than the
# families above. The file is better evidence than the template, which may be missing.
ARCHITECTURES = frozenset(
    {
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Mistral3ForConditionalGeneration",
        "Ministral3ForCausalLM",
        "LlavaForConditionalGeneration",
        "PixtralForConditionalGeneration",
        "VoxtralForConditionalGeneration",
    }
)
TOKENIZER_FILES = ("tekken.json", "tokenizer.model.v*")
MISTRAL_COMMON = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    architectures=ARCHITECTURES,
    file_patterns=TOKENIZER_FILES,
    recommends={"tokenizer": "mistral", "tool_parser": "mistral"},
)
MAGISTRAL_COMMON = ModelFamilySpec(
    api="1.0",
    model_types=MODEL_TYPES,
    architectures=ARCHITECTURES,
    file_patterns=TOKENIZER_FILES,
    template_markers=("[TOOL_CALLS]", "[THINK]"),
    recommends={"tokenizer": "mistral", "tool_parser": "mistral", "reasoning_parser": "mistral"},
)
