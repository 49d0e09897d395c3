"""The backend `xgrammar`."""

from __future__ import annotations

import json

import pytest
from pegboard_structured_output_xgrammar.backend import XGrammar

from pegboard.interfaces.structured_output import (
    Constraint,
    StructuredOutput,
    StructuredOutputSetup,
)
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_structured_output import StructuredOutputContract, small_setup


def test_contract() -> None:
    check_entry(installed_entry("structured_output", "xgrammar"))


class TestXGrammar(StructuredOutputContract):
    def backend(self, setup: StructuredOutputSetup) -> StructuredOutput:
        return XGrammar(None, setup)


@pytest.mark.parametrize("is_older", [True, False])
def test_strings_with_lengths_hold_no_control_characters_in_structural_tags_either(
    is_older: bool,
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 2}},
        "required": ["a"],
    }
    tag = {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "</f>",
    }
    text = {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]},
    }
    if is_older:
        text = {
            "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
            "triggers": ["<f"],
        }
    root = XGrammar(None, small_setup()).compile(Constraint("structural_tag", json.dumps(text)))
    for inside in ("ab", "\x01b"):
        written = f'x <f>{{"a": "{inside}"}}</f> y'.encode()
        assert root.fork().accept(list(written)) == (
            written.index(1) if 1 in written else len(written)
        )


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"type": "regex", "pattern": "a*", "excludes": ["b"]}, "excludes"),
        ({"type": "regex", "pattern": "a^b"}, "inner anchor"),
        (
            {
                "type": "json_schema",
                "json_schema": {"type": "string", "pattern": "a"},
                "excludes": ["b"],
            },
            "pattern",
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"type": "string", "maxLength": 3},
                "excludes": ["b"],
            },
            "maxLength",
        ),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [], "special_tokens": []},
            "special tokens",
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"type": "string", "format": "date"},
                "excludes": ["<b"],
            },
            None,
        ),
        ({"type": "regex", "pattern": "a*"}, None),
    ],
)
def test_what_structural_tags_cannot_hold(form: dict[str, object], why: str | None) -> None:
    text = json.dumps(
        {"type": "structural_tag", "format": {"type": "sequence", "elements": [form]}}
    )
    reason = XGrammar(None, small_setup()).reject(Constraint("structural_tag", text))
    assert reason is None if why is None else why in (reason or "")
