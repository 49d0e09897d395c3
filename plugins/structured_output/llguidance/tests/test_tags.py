"""Structural tags as Lark."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_structured_output_llguidance.backend import Guidance
from pegboard_structured_output_llguidance.tag_grammar import tag_grammar, with_free_strings

from pegboard.errors import RequestError
from pegboard.interfaces.structured_output import Constraint
from pegboard_testing.contract_structured_output import EOS, VOCAB_SIZE, mask_of, small_setup

WORDS = ["</b>", "<c>"]


def tag(form: dict[str, Any], **more: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": form, **more})


def takes(text: str, *outputs: str) -> list[bool]:
    backend = Guidance(None, small_setup())
    root = backend.compile(Constraint("structural_tag", text))
    found = []
    for output in outputs:
        state = root.fork()
        data = list(output.encode())
        found.append(
            state.accept(data) == len(data) and bool(mask_of(backend, state, VOCAB_SIZE)[EOS])
        )
    return found


def test_tags_of_users() -> None:
    inner = {"type": "json_schema", "json_schema": {"type": "integer"}}
    form = {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [
            {"type": "tag", "begin": f"<f{i}>", "content": inner, "end": "</f>"} for i in (1, 2)
        ],
    }
    outputs = ["", "a <b", "<f1>3</f>x<f2>4</f>", "<f3>", "<f1>x</f>", "<f1>3"]
    assert takes(tag(form), *outputs) == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "regex", "pattern": "a*"},
        {"type": "sequence", "elements": []},
        {"type": "triggered_tags", "triggers": ["<"], "tags": [], "stop_after_first": True},
        {"type": "triggered_tags", "triggers": ["<"], "tags": []},
        {"type": "tags_with_separator", "separator": ",", "tags": []},
        {
            "type": "tag",
            "begin": "a",
            "content": {"type": "json_schema", "json_schema": {}},
            "end": ["b", "c"],
        },
        {"type": "tag", "begin": "a"},
    ],
)
def test_what_is_not_supported_is_refused(form: dict[str, Any]) -> None:
    backend = Guidance(None, small_setup())
    assert len(backend.reject(Constraint("structural_tag", tag(form))) or "") > 5
    with pytest.raises(RequestError):
        backend.compile(Constraint("structural_tag", tag(form)))


def test_patterns_that_exclude_words_and_are_followed_by_one() -> None:
    body = {"type": "regex", "pattern": r"[\s\S]{2,5}", "excludes": WORDS}
    form = {"type": "sequence", "elements": [body, {"type": "const_string", "value": "</b>"}]}
    assert takes(
        tag(form, prefix_free=True), "ab</b>", "a</b>", "a</</b>", "<c></b>", "<c</b>", "abcdef</b>"
    ) == [
        True,
        False,
        True,
        False,
        True,
        False,
    ]


def test_parts_that_may_be_left_out_begin_like_what_follows() -> None:
    def text(value: str) -> dict[str, Any]:
        return {"type": "const_string", "value": value}

    number = {"type": "json_schema", "json_schema": {"type": "integer"}}
    form = {
        "type": "sequence",
        "elements": [
            text("<p>x</p>"),
            {"type": "optional", "content": text("<p=a>y</p>")},
            text("<p=b>"),
            number,
        ],
    }
    assert takes(
        tag(form, prefix_free=True), "<p>x</p><p=b>3", "<p>x</p><p=a>y</p><p=b>3", "<p>x</p><p=a>3"
    ) == [
        True,
        True,
        False,
    ]


def test_neighbouring_tokens_are_ranges() -> None:
    form = {
        "type": "triggered_tags",
        "triggers": [],
        "special_tokens": [9, 4, 5, 6],
        "tags": [
            {
                "type": "tag",
                "begin": {"type": "token", "token": 7},
                "content": {"type": "const_string", "value": "x"},
                "end": "",
            }
        ],
    }
    lark = tag_grammar({"format": form, "prefix_free": True})
    assert "<[4-6,9]>" in lark and "<[7]>" in lark


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from(["", "x", "</b>", "a<c>d", "<", "<b"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["k", "<c>", "a"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(VALUES)
def test_a_schema_without_words_is_the_schema_but_for_these(value: object) -> None:
    schema = {"anyOf": [{"type": ["array", "object", "string", "null"]}, {"enum": [True, "</b>"]}]}
    made = with_free_strings(schema, WORDS)
    is_valid = jsonschema.Draft202012Validator(schema).is_valid(value)
    holds_word = any(word in json.dumps(value) for word in WORDS)
    assert jsonschema.Draft202012Validator(made).is_valid(value) == (is_valid and not holds_word)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "."},
        {"type": "string", "format": "email"},
        {"enum": ["</b>"]},
        {"minLength": 3},
        {"type": "object", "properties": {"<c>": {}}},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "patternProperties": {"a": {}}},
    ],
)
def test_schemas_that_do_not_go_with_excluded_words(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w+"):
        with_free_strings(schema, WORDS)
