"""Calls that follow a schema: every chunking gives the same calls, and text that is not a call is
not lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.errors import RequestError
from pegboard_chat.parsing import fold
from pegboard_chat.parsing.forced_calls import (
    NamedCall,
    RequiredCalls,
    named_schema,
    required_schema,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)
CALLS = st.lists(st.tuples(st.text(min_size=1, max_size=8), ARGUMENTS), min_size=1, max_size=4)
LAYOUTS = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 2}, {"ensure_ascii": False}])


def chunks(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in zip(places, places[1:], strict=False)]


def read(parser, pieces):
    events = [event for piece in pieces for event in parser.feed(piece, ())]
    message = fold([*events, *parser.finish()])
    return message.content, [
        (call.name, call.arguments, call.is_complete) for call in message.tool_calls
    ]


@given(CALLS, LAYOUTS, st.booleans(), st.lists(st.integers(0, 10**6), max_size=20))
def test_a_list_of_calls_in_any_chunks(calls, layout, name_first, cuts):
    order = (
        (lambda name, value: {"name": name, "parameters": value})
        if name_first
        else lambda n, v: {"parameters": v, "name": n}
    )
    text = " " + json.dumps([order(*call) for call in calls], **layout) + "\n"
    content, found = read(RequiredCalls(), chunks(text, cuts))
    assert content == ""
    assert [(name, json.loads(arguments), done) for name, arguments, done in found] == [
        (n, a, True) for n, a in calls
    ]
    assert (content, found) == read(RequiredCalls(), list(text))


@given(
    st.text(alphabet='[]{}":,\\ namet1é', max_size=60), st.lists(st.integers(0, 100), max_size=8)
)
def test_any_text_is_read_without_loss_in_any_chunks(text, cuts):
    found = read(RequiredCalls(), chunks(text, cuts))
    assert found == read(RequiredCalls(), [text])
    if not found[1]:
        assert found[0] in (text, text.rstrip())


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[{"name": "f", "parameters": {"a": "x', "", [("f", '{"a": "x', False)]),
        ('[{"na', '[{"na', []),
        ("[]", "[]", []),
        ("Sorry, no.", "Sorry, no.", []),
        ('[{"x": 1}] y', '[{"x": 1}] y', []),
        ('[{"name": "f", "parameters": {}}] and more', "and more", [("f", "{}", True)]),
        ('[{"name": "f"}]', "", [("f", "{}", True)]),
    ],
)
def test_cut_off_and_malformed_lists(text, content, calls):
    assert read(RequiredCalls(), text) == (content, calls)


@given(ARGUMENTS, st.lists(st.integers(0, 10**6), max_size=20))
def test_a_named_call_is_all_of_the_text(arguments, cuts):
    text = json.dumps(arguments)
    assert read(NamedCall("f"), chunks(f"\n {text} \n", cuts)) == ("", [("f", text, True)])


def tool(name, **schema):
    return {"type": "function", "function": {"name": name, **schema}}


def test_schemas():
    number = {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/N"}},
        "$defs": {"N": {"type": "integer"}},
    }
    tools = [tool("f", parameters=number), tool("g")]
    assert named_schema(tools, "f") == number and named_schema(tools, "g") == {
        "type": "object",
        "properties": {},
    }
    schema = required_schema(tools, is_parallel=False)
    assert (schema["minItems"], schema["maxItems"], schema["$defs"]) == (1, 1, number["$defs"])
    assert [item["properties"]["name"]["enum"] for item in schema["items"]["anyOf"]] == [
        ["f"],
        ["g"],
    ]
    assert (
        "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"] and "$defs" in number
    )
    with pytest.raises(RequestError, match="'h'.*f, g"):
        named_schema(tools, "h")
    with pytest.raises(RequestError, match="must be an object"):
        required_schema([tool("f", parameters={"$defs": [1]})])
    with pytest.raises(RequestError, match="differently"):
        required_schema([tools[0], tool("h", parameters={"$defs": {"N": {"type": "string"}}})])
