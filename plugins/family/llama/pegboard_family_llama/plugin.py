"""Specs of this package. The chat template shows the format in which a Llama model should call
tools."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

SPECIAL = frozenset({"special_tokens"})
TOOL_PARSER_JSON = OutputParserSpec(
    api="1.0", implementation="pegboard_family_llama.tool_parser:LlamaJsonToolParser", flags=SPECIAL
)
TOOL_PARSER_PYTHONIC = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_llama.tool_parser:Llama4PythonicToolParser",
    flags=SPECIAL,
)

TYPES_3 = frozenset({"llama", "mllama"})
ARCHITECTURES_3 = frozenset({"LlamaForCausalLM", "MllamaForConditionalGeneration"})
TYPES_4 = frozenset({"llama4", "llama4_text"})
ARCHITECTURES_4 = frozenset({"Llama4ForCausalLM", "Llama4ForConditionalGeneration"})
JSON_FORMAT = '{"name": function name, "parameters": dictionary of argument name and its value}'

# Recognizes Meta's template of 3.0 by its own words: a fine-tuned model with a different template
# must keep its template.
LLAMA_3 = ModelFamilySpec(
    api="1.0",
    model_types=TYPES_3,
    architectures=ARCHITECTURES_3,
    template_markers=(
        "<|start_header_id|>' + message['role'] + '<|end_header_id|>",
        "set content = bos_token + content",
    ),
    recommends={"tool_parser": "llama3_json"},
    chat_template="pegboard_family_llama:llama3_json.jinja",
)
LLAMA_3_1 = ModelFamilySpec(
    api="1.0",
    model_types=TYPES_3,
    architectures=ARCHITECTURES_3,
    template_markers=("<|start_header_id|>", JSON_FORMAT),
    recommends={"tool_parser": "llama3_json"},
)
LLAMA_4 = ModelFamilySpec(
    api="1.0",
    model_types=TYPES_4,
    architectures=ARCHITECTURES_4,
    recommends={"tool_parser": "llama4_pythonic"},
)
LLAMA_4_JSON = ModelFamilySpec(
    api="1.0",
    model_types=TYPES_4,
    architectures=ARCHITECTURES_4,
    template_markers=(JSON_FORMAT,),
    recommends={"tool_parser": "llama4_json"},
)
