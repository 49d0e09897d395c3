"""Which features a JSON schema and a regular expression use."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pegboard.interfaces.structured_output import StructuredOutputNeed
from pegboard_chat.parsing.json_schema import (
    Dialect,
    problem,
    resolve,
    restrictions,
    subschemas,
    suits_by,
)
from pegboard_chat.parsing.regex_syntax import (
    can_match,
    expanded_size,
    features,
    pattern_problem,
    pieces,
    string_problem,
    with_ascii_classes,
    without_anchors,
    without_newlines,
)

EVERYTHING = Dialect(
    string=frozenset({"minLength", "maxLength", "pattern", "format"}),
    number=frozenset({"minimum", "maximum"}),
    array=frozenset({"items", "minItems"}),
    object=frozenset({"properties", "required", "additionalProperties"}),
    formats=frozenset({"date"}),
)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {
                "type": "object",
                "properties": {"a": {"type": "string"}},
                "required": ["a"],
                "additionalProperties": False,
            },
            None,
        ),
        (
            {
                "anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}],
                "title": "x",
                "default": None,
            },
            None,
        ),
        (
            {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"enum": [1, "x"]}}},
            None,
        ),
        ({"type": "string", "x-mine": 3, "nullable": True}, None),
        ({"uniqueItems": False, "minItems": 0, "type": "array"}, None),
        ({"type": "array", "uniqueItems": True}, "uniqueItems is not enforced at #"),
        (
            {"properties": {"a": {"type": "integer", "multipleOf": 2}}},
            "multipleOf is not enforced at #/properties/a",
        ),
        ({"type": "string", "format": "time"}, "format 'time' is not enforced"),
        ({"type": "strin"}, "type 'strin' is unknown"),
        ({"not": {}}, "not is not enforced"),
        ({"minimum": 3}, "minimum without type"),
        ({"type": "integer", "anyOf": [{}]}, "anyOf next to type"),
        ({"$ref": "#/$defs/a", "$defs": {}}, "leads nowhere"),
        ({"$ref": "other.json"}, "leads nowhere"),
        ({"allOf": [{}, {}]}, "allOf of several"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "do not visibly exclude"),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, None),
        ({"oneOf": [{"const": "a"}, {"enum": ["b", 1]}]}, None),
        ({"oneOf": [{"const": 1}, {"enum": [True, 1.0]}]}, "do not visibly exclude"),
        ({"enum": []}, "enum is not a list"),
        ({"type": "string", "enum": ["a", 1]}, "is not of type"),
        ({"type": "object", "required": ["a"]}, "'a' is not among the properties"),
        ({"type": "object", "properties": {"additionalProperties": False}}, "allows no value"),
        (False, "allows no value"),
        (True, None),
        (
            {"type": "string", "pattern": "a", "maxLength": 2},
            "pattern, format and lengths together",
        ),
        ({"type": ["string", "null"], "maxLength": 2}, None),
        ([], "is not a schema"),
        ({"items": 3}, "is not a schema"),
    ],
)
def test_problems_are_found_and_placed(schema: Any, words: str | None) -> None:
    found = problem(schema, EVERYTHING)
    assert found is None if words is None else words in (found or "")


def test_objections_of_a_backend() -> None:
    picky = Dialect(
        **{
            **vars(EVERYTHING),
            "several_types": False,
            "pattern": lambda pattern: (
                pattern_problem(pattern, frozenset({"look-around"}), 20) or string_problem(pattern)
            ),
            "extra": lambda schema: "no titles" if "title" in schema else None,
        }
    )
    assert problem({"type": ["string", "null"]}, picky) is None
    assert (
        problem({"type": ["string", "null"], "maxLength": 2}, picky)
        == "several types with further keywords are not enforced at #"
    )
    assert problem({"items": {"title": "x"}, "type": "array"}, picky) == "no titles at #/items"
    patterns = {
        "a{3}": None,
        "(?=a)": "look-around",
        "a{30}": "too large: 30",
        '"': "quotes",
        "[^a]": "quotes",
    }
    for pattern, words in patterns.items():
        found = problem({"type": "string", "pattern": pattern}, picky)
        assert found is None if words is None else words in (found or ""), pattern


def test_what_is_rejected_does_not_suit() -> None:
    suits = suits_by(
        lambda constraint: None if json.loads(constraint.text) == {} else f"no {constraint.kind}"
    )
    assert suits(StructuredOutputNeed()) == suits(StructuredOutputNeed(constraint="json")) == []
    assert (
        suits(StructuredOutputNeed(constraint="json", text={}))
        == suits(StructuredOutputNeed(constraint="json", text="{}"))
        == []
    )
    assert suits(StructuredOutputNeed(constraint="json", text={"type": "null"})) == ["no json"]


def test_one_of_by_a_property_that_tells_them_apart() -> None:
    def branch(kind: str, *, required: bool = True) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"kind": {"const": kind}},
            "required": ["kind"] if required else [],
        }

    references = {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {"a": branch("a"), "b": branch("b")},
    }
    assert (
        problem({"oneOf": [branch("a"), branch("b")]}, EVERYTHING) is None
        and problem(references, EVERYTHING) is None
    )
    assert problem({"oneOf": [branch("a"), branch("a")]}, EVERYTHING)
    assert problem({"oneOf": [branch("a"), branch("b", required=False)]}, EVERYTHING)


def test_recursion() -> None:
    tree = {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}},
    }
    assert problem(tree, EVERYTHING) is None
    flat = Dialect(**{**vars(EVERYTHING), "is_recursive": False})
    assert "recursive" in (problem(tree, flat) or "")
    assert (
        problem(
            {"items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "null"}}, "type": "array"},
            flat,
        )
        is None
    )


def test_walking_and_pointing() -> None:
    schema = {
        "properties": {"a": {"items": [{"const": {"items": 1}}, {}]}},
        "definitions": {"x/y": {"type": "null"}},
    }
    places = [path for path, _ in subschemas(schema)]
    assert places == [
        "#",
        "#/properties/a",
        "#/properties/a/items/0",
        "#/properties/a/items/1",
        "#/definitions/x/y",
    ]
    assert (
        resolve(schema, "#/definitions/x~1y") == {"type": "null"} and resolve(schema, "#") is schema
    )
    assert resolve(schema, "#/properties/a/items/1") == {}
    assert restrictions({"title": "t", "type": "null", "$defs": {}, "x": 1}) == {"type"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"a[b-d]\d{2,3}(?:x|y)*z?", set()),
        (r"^a|b$", set()),
        (r"(^a$)", set()),
        (r"(?=a)b", {"look-around"}),
        (r"(?<!a)b", {"look-around"}),
        (r"(a)\1", {"backreference"}),
        (r"(?P<n>a)(?P=n)", {"named group", "backreference"}),
        (r"\bfoo\B", {"word boundary"}),
        (r"a^b", {"inner anchor"}),
        (r"(a$)*", {"inner anchor"}),
        (r"\Aa\Z", {"inner anchor"}),
        (r"(?i)a", {"inline flag"}),
        (r"(?s:a)", {"inline flag"}),
        (r"(?>a)", {"atomic group"}),
        (r"a*+", {"possessive repeat"}),
        (r"\p{L}", {"unicode property"}),
        (r"[$^]\^\$\\b", set()),
        (r"[\b]", set()),
    ],
)
def test_features(pattern: str, expected: set[str]) -> None:
    assert features(pattern) == expected


# what re says of some random patterns
@pytest.mark.filterwarnings("ignore:Possible (nested set|set):FutureWarning")
@given(st.text(alphabet=r"ab[]()\^$|*+?{}.,:=!<>-d1 ", max_size=20))
def test_pieces_join_to_the_pattern(pattern: str) -> None:
    assert "".join(piece.text for piece in pieces(pattern)) == pattern
    assert expanded_size(pattern) >= 0 and isinstance(can_match(pattern, '"'), bool)


@given(
    st.from_regex(r"([abd.]|\\d|\\w|\\s|\[a\\d\]){1,6}", fullmatch=True),
    st.text(alphabet="ab1 \n_٣é", max_size=6),
)
def test_rewriting_keeps_ascii_meaning(pattern: str, text: str) -> None:
    ascii_only = bool(re.fullmatch(with_ascii_classes(pattern), text))
    assert ascii_only == bool(re.fullmatch(pattern, text, re.ASCII))
    assume("\r" not in text)
    assert bool(re.fullmatch(without_newlines(pattern), text)) == bool(re.fullmatch(pattern, text))


def test_rewriting() -> None:
    assert without_anchors("^a$|^b$") == "a|b" and without_newlines(r"a.[.]\.") == r"a[^\n\r][.]\."
    assert with_ascii_classes(r"[\d\\d]\\d") == r"[0-9\\d]\\d"
    assert expanded_size("(a{10}b){3}c") == 34 and expanded_size("[ab]{2,5}x*") == 6


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("[^a]", True),
        (".", True),
        ('"', True),
        (r"\S", True),
        ("[a-z]+", False),
        (r"\d", False),
        (r"\"", True),
    ],
)
def test_can_match(pattern: str, expected: bool) -> None:
    assert can_match(pattern, '"\\') == expected


def test_long_patterns_and_many_references_take_no_time() -> None:
    pattern = "[" * 50_000 + "^" * 50_000
    assert (
        features(pattern) == {"excessive length"}
        and can_match(pattern, '"')
        and expanded_size(pattern) == len(pattern)
    )
    definitions: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)
    }
    definitions["d60"] = {"type": "null"}
    flat = Dialect(**{**vars(EVERYTHING), "is_recursive": False})
    assert problem({"$ref": "#/$defs/d0", "$defs": definitions}, flat) is None


def test_a_schema_is_json() -> None:
    assert problem(json.loads('{"const": {"a": [1, null]}}'), EVERYTHING) is None
