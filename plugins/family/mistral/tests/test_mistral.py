"""The ids of Mistral's calls, and which family a checkpoint is."""

from __future__ import annotations

import re

import pytest
from pegboard_family_mistral.tool_parser import MistralToolParser

from pegboard.interfaces.model_family import ModelFamilyNeed
from pegboard.plan.families import choose_family
from pegboard.plugins.registry import Registry
from pegboard_chat.parsing import fold
from pegboard_testing.contract_output_parser import run


def test_ids_are_those_that_the_templates_take() -> None:
    text = (
        '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS][{"name": "g", '
        '"arguments": {}}]'
    )
    ids = [call.id for call in fold(run(MistralToolParser(), [text])).tool_calls]
    assert len(set(ids)) == 3 and all(re.fullmatch("[a-zA-Z0-9]{9}", id) for id in ids)
    assert ids[1] == "a1B2c3D4e"
    assert re.fullmatch("[a-zA-Z0-9]{9}", MistralToolParser().call_id(0, "f")), (
        "also when the request forces the call"
    )


TYPES = [
    ("mistral", "MistralForCausalLM"),
    ("mistral3", "Mistral3ForConditionalGeneration"),
    ("mixtral", "MixtralForCausalLM"),
]


@pytest.mark.parametrize(("model_type", "architecture"), TYPES)
@pytest.mark.parametrize(
    ("template", "files", "name"),
    [
        ("[TOOL_CALLS]", set(), "mistral"),
        ("[TOOL_CALLS] [THINK]", {"tokenizer.json", "tokenizer.model"}, "magistral"),
        (None, {"tekken.json"}, "mistral_common"),
        ("[TOOL_CALLS]", {"tokenizer.model.v3", "tokenizer.json"}, "mistral_common"),
        ("[TOOL_CALLS] [THINK]", {"tekken.json"}, "magistral_common"),
        ("<tools> <tool_call>", {"tokenizer.json"}, "hermes"),
        ("nothing", set(), None),
    ],
)
def test_the_family_follows_from_template_and_files(
    model_type: str, architecture: str, template: str | None, files: set[str], name: str | None
) -> None:
    need = ModelFamilyNeed(
        model_type=model_type,
        architectures=frozenset({architecture}),
        template=template,
        files=frozenset(files),
    )
    family = choose_family(Registry.discover(), need)
    assert family.name == (
        None if name == "hermes" and architecture != "MistralForCausalLM" else name
    ), family.reason
    if name in ("mistral", "magistral", "mistral_common", "magistral_common"):
        assert family.recommends["tool_parser"] == "mistral"
        assert ("reasoning_parser" in family.recommends) == name.startswith("magistral")
        assert ("tokenizer" in family.recommends) == name.endswith("_common")
