"""response_format and structured_outputs: the constraints that the engine gets, and the fields that
are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pegboard_api_openai.sampling import structure

from pegboard.data.sampling_params import StructuredOutputsParams
from pegboard.errors import RequestError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
NEW_TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}


@pytest.mark.parametrize(
    ("form", "given", "expected"),
    [
        (None, None, None),
        ({"type": "text"}, None, None),
        ({"type": "text"}, {"regex": "a+"}, {"regex": "a+"}),
        ({"type": "json_object"}, None, {"json_object": True}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            None,
            {"json": SCHEMA},
        ),
        (TAG, None, {"structural_tag": json.dumps(TAG)}),
        (NEW_TAG, None, {"structural_tag": json.dumps(NEW_TAG)}),
        (None, {"json": SCHEMA, "regex": None}, {"json": SCHEMA}),
        (None, {"json": json.dumps(SCHEMA)}, {"json": json.dumps(SCHEMA)}),
        (
            None,
            {"choice": ["a"], "disable_any_whitespace": True},
            {"choice": ["a"], "disable_any_whitespace": True},
        ),
        (None, {"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        (
            None,
            {"json_object": True, "whitespace_pattern": " ?"},
            {"json_object": True, "whitespace_pattern": " ?"},
        ),
        (None, {"structural_tag": json.dumps(NEW_TAG)}, {"structural_tag": json.dumps(NEW_TAG)}),
    ],
)
def test_both_fields_become_one_constraint(form: Any, given: Any, expected: Any) -> None:
    field = "structured_outputs" if given else "response_format"
    assert structure(form, given) == (
        None if expected is None else StructuredOutputsParams(**expected, parameter=field)
    )


@pytest.mark.parametrize(
    ("form", "given", "parameter", "words"),
    [
        ({}, None, "response_format", "expected one of 'text', 'json_object'"),
        ({"type": "json"}, None, "response_format", "got 'json'"),
        (
            {"type": "json_object", "schema": {}},
            None,
            "response_format",
            "unknown field 'response_format.schema'",
        ),
        (
            {"type": "json_schema"},
            None,
            "response_format",
            "expected an object with name and schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            None,
            "response_format",
            "name is required",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "n"}},
            None,
            "response_format",
            "expected a JSON schema",
        ),
        ({"type": "json_object"}, {"regex": "a"}, "structured_outputs", "exclude each other"),
        (None, {}, "structured_outputs", "exactly one"),
        (None, {"regex": "a", "choice": ["b"]}, "structured_outputs", "exactly one"),
        (None, {"regexp": "a"}, "structured_outputs", "unknown field 'structured_outputs.regexp'"),
        (
            None,
            {"regex": "a", "reasoning_end_token_ids": [[1]]},
            "structured_outputs",
            "unknown field",
        ),
        (None, {"regex": 3}, "structured_outputs", "regex must be text, got 3"),
        (None, {"regex": ""}, "structured_outputs", "regex must not be empty"),
        (None, {"choice": []}, "structured_outputs", "choice must be a list of strings"),
        (None, {"choice": [1]}, "structured_outputs", "choice must be a list of strings"),
        (None, {"json": "{"}, "structured_outputs", "json is not JSON"),
        (None, {"json": 5}, "structured_outputs", "json must be text"),
        (None, {"json": "[]"}, "structured_outputs", "must be a JSON object"),
        (None, {"json_object": False}, "structured_outputs", "json_object must be true"),
        (None, {"structural_tag": "x"}, "structured_outputs", "structural_tag is not JSON"),
        (
            None,
            {"regex": "a", "disable_any_whitespace": 1},
            "structured_outputs",
            "expected true or false",
        ),
        (None, {"json": {}, "whitespace_pattern": 1}, "structured_outputs", "expected a string"),
    ],
)
def test_wrong_fields_are_named(form: Any, given: Any, parameter: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        structure(form, given)
    assert caught.value.parameter == parameter and words in str(caught.value)


@pytest.mark.parametrize("depth", [98, 200, 5000])
def test_schemas_are_not_nested_without_end(depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    if depth < 100:
        assert structure(None, {"json": schema}) is not None
    else:
        with pytest.raises(RequestError, match="nested deeper|is not JSON"):
            structure(None, {"json": schema})


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
)
def test_it_reaches_the_engine(http: Any, fields: dict[str, Any]) -> None:
    server = http()
    server.chat(**fields)
    server.complete(**fields)
    for _, params, *_ in server.engine.requests[-2:]:
        assert params.structured_outputs == StructuredOutputsParams(
            json_object=True, parameter=next(iter(fields))
        )


def test_beam_search_refuses_it(http: Any) -> None:
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
    ):
        error = http().complete(use_beam_search=True, temperature=0, status=400, **fields)["error"]
        assert error["param"] in fields and "no effect with use_beam_search" in error["message"]
