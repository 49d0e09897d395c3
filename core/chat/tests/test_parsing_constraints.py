"""Formats of structural tags and the patterns in them."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard_chat.parsing import TagFormat, constrained_tags
from pegboard_chat.parsing.schema_cases import FORMATS, cases, members, self_contained
from pegboard_chat.parsing.structural_tag import (
    diverging,
    exactly,
    listed,
    searched,
    sequence,
    text,
    without,
)

WORDS = ["</parameter>", "<parameter=", "</function>"]
PIECES = [
    "<",
    "</",
    "</p",
    "parameter",
    "parameter=",
    ">",
    "/",
    "x",
    "</function",
    "<parameter",
    "=",
    "\n",
    "é",
    "[",
    "\\",
]


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_without_is_all_text_that_holds_none_of_the_words(value: str) -> None:
    assert bool(re.fullmatch(without(WORDS), value)) == (not any(word in value for word in WORDS))


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_diverging_is_the_least_that_begins_no_word(value: str) -> None:
    matched = re.match(diverging(WORDS, "x"), value)
    if matched is None:
        begun = [
            value.rfind("<") == i and any(word.startswith(value[i:]) for word in WORDS)
            for i in range(len(value))
        ]
        assert not value or value[0] == "x" or any(begun) or any(word in value for word in WORDS)
    else:
        assert not any(word in matched.group() for word in WORDS)
        assert not any(word.startswith(matched.group()) for word in WORDS)


def test_words_that_overlap_themselves_are_no_words() -> None:
    with pytest.raises(ValueError, match="same character"):
        without(["<a<"])
    with pytest.raises(ValueError, match="same character"):
        without(["<a", "b"])


@given(st.text())
def test_exactly(value: str) -> None:
    assert re.fullmatch(exactly(value), value)


@given(
    st.sampled_from(
        ["ab", "^ab", "ab$", "^ab$", "^a|b$", "a|^b", "^(a|b)$", "[a$]b", r"a\$", "^$"]
    ),
    st.lists(st.sampled_from(["a", "b", "c", "$", "\n"]), max_size=5).map("".join),
)
def test_searched_matches_whole_texts_in_which_the_pattern_is_found(
    pattern: str, value: str
) -> None:
    whole = searched(pattern)
    assert whole is not None
    is_found = re.search(
        pattern.replace("$", r"\Z") if "[" not in pattern and "\\" not in pattern else pattern,
        value,
    )
    assert bool(re.fullmatch(whole, value)) == bool(is_found)


@pytest.mark.parametrize("pattern", ["a^b", "(^a)b", "(a$|b)"])
def test_anchors_inside_are_not_searched(pattern: str) -> None:
    assert searched(pattern) is None


@given(st.lists(st.booleans(), max_size=5), st.data())
def test_listed_has_separators_between_any_two(required: list[bool], data: st.DataObject) -> None:
    form = listed(
        [(text(f"<{i}>"), is_required) for i, is_required in enumerate(required)], text(",")
    )
    there = [i for i, is_required in enumerate(required) if is_required or data.draw(st.booleans())]
    pattern = _pattern(form)
    assert re.fullmatch(pattern, ",".join(f"<{i}>" for i in there))
    for wrong in (
        ",",
        *([",".join(f"<{i}>" for i in there[1:])] if there and required[there[0]] else []),
    ):
        assert not re.fullmatch(pattern, wrong)


def _pattern(form) -> str:
    inner = [_pattern(part) for part in form.get("elements", ())]
    if form["type"] == "optional":
        return f"(?:{_pattern(form['content'])})?"
    return (
        re.escape(form["value"])
        if "value" in form
        else f"(?:{('|' if form['type'] == 'or' else '').join(inner)})"
    )


def test_sequences_are_flat() -> None:
    assert sequence(text("a"), sequence(text("b"), text("c")), text("")) == {
        "type": "sequence",
        "elements": [text("a"), text("b"), text("c")],
    }
    assert sequence(text(""), text("a")) == text("a")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "2024-01-31", "2023-02-29"),
        ("date", "1999-11-30", "1999-11-31"),
        ("time", "23:59:59.5Z", "24:00:00Z"),
        ("date-time", "2024-12-01T00:00:00+02:00", "2024-12-01"),
        ("uuid", "00000000-0000-4000-8000-00000000aBcD", "00000000-0000-4000-8000-00000000aBc"),
    ],
)
def test_formats(name: str, good: str, bad: str) -> None:
    assert re.fullmatch(FORMATS[name], good) and not re.fullmatch(FORMATS[name], bad)


def test_cases_of_unions_references_and_constants() -> None:
    root = {"$defs": {"A": {"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["x", 2.5]}]}}}
    found = cases(
        {
            "anyOf": [
                {"$ref": "#/$defs/A"},
                {"type": ["string", "null"], "minLength": 2, "title": "t"},
                True,
            ]
        },
        root,
    )
    assert found.constants == ("x", 2.5)
    assert found.schemas == (
        {"type": "integer", "minimum": 1},
        {"type": "string", "minLength": 2},
        {"type": "null"},
        {},
    )
    assert cases({"type": "number", "enum": [1, 2.5, "x", True]}, {}).constants == (1, 2.5)


def test_members() -> None:
    assert members(
        {"properties": {"a": {}, "b": {"type": "null"}}, "required": ["b"]}
    ).properties == (
        ("a", {}, False),
        ("b", {"type": "null"}, True),
    )
    assert members({"type": "object"}).values is True
    assert members({"additionalProperties": {"type": "string"}}).values == {"type": "string"}
    assert members({"additionalProperties": False}).values is None


def test_a_part_takes_its_definitions_along() -> None:
    root = {"$defs": {"A": {"type": "null"}}, "properties": {}}
    part = {"type": "array", "items": {"$ref": "#/$defs/A"}}
    assert self_contained(part, root) == {**part, "$defs": root["$defs"]}
    assert self_contained({"type": "array"}, root) == {"type": "array"}


def test_a_tag_says_how_text_and_json_are_written() -> None:
    tags = TagFormat(
        key_start="<p=", key_end=">", value_end="</p>", end="</f>", name_end=">", pad="\n"
    )
    schema = {
        "type": "object",
        "properties": {"s": {"type": "string"}, "o": {"type": "object"}},
        "required": ["s"],
    }
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    made = constrained_tags([tool], tags, [("<f=", "<f=")])
    assert made is not None
    (tag,) = json.loads(made.text)["format"]["tags"]
    assert (tag["begin"], tag["end"]) == ("<f=f>\n", "</f>")
    *string, other = tag["content"]["elements"]
    assert string == [
        text("<p="),
        text("s"),
        text(">\n"),
        {"type": "any_text", "excludes": ["</p>"]},
        text("\n</p>\n"),
    ]
    assert other["type"] == "optional"
    assert other["content"]["elements"][3] == {
        "type": "json_schema",
        "json_schema": {"type": "object"},
        "excludes": ["</p>"],
    }
    assert constrained_tags([], tags, [("<f=", "<f=")]) is None
