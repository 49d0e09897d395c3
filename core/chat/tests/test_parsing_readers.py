"""Reading values and calls from text that arrives in pieces, compared with json, ast and simple
rules."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.interfaces.output_parser import Content, OutputParserSetup
from pegboard_chat.parsing import (
    CallKeys,
    Markers,
    Message,
    Steps,
    StreamParser,
    TagFormat,
    TextReader,
    ToolCall,
    coerce,
    fold,
    parameter_types,
    read_call_list,
    read_call_object,
    read_python_calls,
    read_tagged_call,
    stream_json,
    stream_python,
)
from pegboard_testing.contract_output_parser import VOCABULARY, cut, run
from pegboard_testing.parser_examples import tool

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
)
places = st.lists(st.integers(0, 500), max_size=20)


def read(steps: Callable[[TextReader], Steps[bool]], pieces: list[str]) -> tuple[str, bool, str]:
    """Return (the streamed text, the result, the text that was not consumed)."""
    text = TextReader()
    parts = []
    running = None
    for place in range(len(pieces) + 1):
        if place == len(pieces):
            text.close()
        else:
            text.append(pieces[place])
        running = running or steps(text)
        try:
            while (event := next(running)) is not None:
                assert isinstance(event, Content)
                parts.append(event.text)
        except StopIteration as end:
            window, start = text.window()
            return "".join(parts), end.value, window[start:] + "".join(pieces[place + 1 :])
    raise AssertionError("it waits although there is no more text")


def json_steps(text: TextReader) -> Steps[bool]:
    return stream_json(text, Content)


def python_steps(text: TextReader) -> Steps[bool]:
    return stream_python(text, Content)


@given(values, st.sampled_from([None, 1]), st.booleans(), places)
def test_json_values_come_out_as_they_are(
    value: Any, indent: int | None, ascii: bool, marks: list[int]
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert read(json_steps, cut(text, marks)) == (text, True, "")
    assert read(json_steps, [*text, "!"]) == (text, True, "!")


@given(st.text(st.sampled_from('{}[]",:\\u0012eE+-.tfn \n\x01é'), max_size=30), places)
def test_json_is_accepted_as_json_accepts_it(text: str, marks: list[int]) -> None:
    """The parser reads the longest valid beginning that Python's json finds. Control characters are
    allowed in strings. Nothing is lost."""
    streamed, is_whole, rest = read(json_steps, cut(text, marks))
    assert (streamed, is_whole, rest) == read(json_steps, list(text)) == read(json_steps, [text])
    assert streamed.replace("\\n", "\n").replace("\\u0001", "\x01") + rest in (
        text,
        text.replace("\\n", "\n").replace("\\u0001", "\x01"),
    )
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text)
    except ValueError:
        assert not is_whole
    else:
        if is_whole:
            assert len(text) - len(rest) == end
            json.loads(streamed)
        else:  # a scalar that continues is not valid: 01, 1.e, truefalse
            assert text[:1] not in '{["'


@given(values, places)
def test_python_literals_become_json(value: Any, marks: list[int]) -> None:
    text = repr(value)
    streamed, is_whole, rest = read(python_steps, cut(text, marks))
    assert is_whole and not rest
    assert json.loads(streamed) == json.loads(json.dumps(value))


PYTHON = [
    "(1, 'a',)",
    "[]",
    "()",
    "{}",
    "[[], {}, ()]",
    "{'a': {1: 2}, 'b': [None,],}",
    '"""a"b"""',
    "'''x'''",
    r"'\x41\u00e9\101\'\"'",
    "1_000",
    ".5",
    "5.",
    "-3e2",
    "+7",
    "''",
    '""',
    "'tab\\there'",
    r"'\U0001F680'",
    "'line\\\ncontinued'",
]


@pytest.mark.parametrize("text", PYTHON)
def test_python_notations(text: str) -> None:
    streamed, is_whole, rest = read(python_steps, list(text))
    assert is_whole and not rest
    assert json.loads(streamed) == json.loads(json.dumps(ast.literal_eval(text)))


def test_an_unknown_escape_means_itself() -> None:
    assert read(python_steps, list(r"'\q\x4'")) == (r'"\\q\\x4"', True, "")


@pytest.mark.parametrize(
    "text",
    [
        "[1,,2]",
        "{1, 2}",
        "[1 2]",
        "{'a'}",
        "(]",
        "f(1)",
        "x",
        "[1",
        "'a",
        "{'a':",
        "__import__('os')",
    ],
)
def test_what_is_no_python_literal(text: str) -> None:
    streamed, is_whole, _ = read(python_steps, list(text))
    assert not is_whole
    assert (streamed, is_whole) == read(python_steps, [text])[:2]


class Objects(StreamParser):
    def read(self) -> Steps[None]:
        while (yield from self.prose(Markers("!"))):
            yield from self.attempt(
                read_call_object(self.text, self.calls, CallKeys(needs_arguments=False))
            )


class Lists(StreamParser):
    def read(self) -> Steps[None]:
        while (yield from self.prose(Markers("!"))):
            yield from self.attempt(read_call_list(self.text, self.calls))


class PythonCalls(StreamParser):
    def read(self) -> Steps[None]:
        while (yield from self.prose(Markers("!"))):
            yield from self.attempt(read_python_calls(self.text, self.calls))


class Tags(StreamParser):
    tags = TagFormat(
        name_end=">",
        key_start="<p=",
        key_end=">",
        value_end="</p>",
        value_stops=("<p=",),
        end="</f>",
    )

    def read(self) -> Steps[None]:
        while (yield from self.prose(Markers("<f="))):
            yield from self.attempt(read_tagged_call(self.text, self.calls, self.tags))


def parsed(
    parser: type[StreamParser], text: str, tools: tuple[dict[str, Any], ...] = ()
) -> Message:
    """Return the message of the text, which is the same if it is fed character by character. Ids
    are dropped, because they are random."""
    message = fold(run(parser(None, OutputParserSetup(VOCABULARY, tools)), [text]))
    again = fold(run(parser(None, OutputParserSetup(VOCABULARY, tools)), text))
    for call in [*message.tool_calls, *again.tool_calls]:
        call.id = ""
    assert message == again
    return message


def call(name: str, arguments: str, is_complete: bool = True) -> ToolCall:
    return ToolCall("", name, arguments, is_complete)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('a !{"name": "f", "arguments": {"x": 1}} b', "a  b", [call("f", '{"x": 1}')]),
        ('!{"arguments": {"x": [1]}, "name": "f"}', "", [call("f", '{"x": [1]}')]),
        ('!{"id": "7", "type": "function", "name": "f", "parameters": {}}', "", [call("f", "{}")]),
        ('!{"name": "f"}', "", [call("f", "{}")]),
        ('!{"name": "f", "arguments": null}', "", [call("f", "{}")]),
        ('!{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [call("f", '{"x": 1}')]),
        ('!{"name": "f", "arguments": [1]}', '!{"name": "f", "arguments": [1]}', []),
        ('!{"name": 1, "arguments": {}}', '!{"name": 1, "arguments": {}}', []),
        ('!{"name": "", "arguments": {}}', '!{"name": "", "arguments": {}}', []),
        ('!{"nom": "f", "arguments": {}} c', '!{"nom": "f", "arguments": {}} c', []),
        ('!{"name": "f", "arguments": {"x": ?}} c', '!{"name": "f", "arguments": {"x": ?}} c', []),
        ('!{"name": "f", "arguments": {?}} c', '!{"name": "f", "arguments": {?}} c', []),
        (
            '!{"name": "f", "arguments": {"y": [1, "x": 2}} c',
            ": 2}} c",
            [call("f", '{"y": [1, "x"]}', False)],
        ),
        (
            '!{"name": "f", "arguments": {"y": {"z": 1}, "x": {"w": ?}} c',
            ', "x": {"w": ?}} c',
            [call("f", '{"y": {"z": 1}}', False)],
        ),
        ('!{"name": "f", "arguments": {}, "more": 1}', ', "more": 1}', [call("f", "{}")]),
        ('!{"name": "f", "arguments": {"x": 12', "", [call("f", '{"x": 12', False)]),
        ('!{"name": "f", "argu', '!{"name": "f", "argu', []),
        ("! no", "! no", []),
        ('!!{"name": "f"}', "!", [call("f", "{}")]),
    ],
)
def test_call_objects(text: str, content: str, calls: list[ToolCall]) -> None:
    message = parsed(Objects, text)
    assert (message.content, message.tool_calls) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            '![{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": "]"}}]',
            "",
            [call("f", "{}"), call("g", '{"x": "]"}')],
        ),
        ("![] x", "![] x", []),
        ('![{"name": "f", "arguments": {}}; x', "; x", [call("f", "{}")]),
        ('![{"name": "f"}]', '![{"name": "f"}]', []),
    ],
)
def test_call_lists(text: str, content: str, calls: list[ToolCall]) -> None:
    message = parsed(Lists, text)
    assert (message.content, message.tool_calls) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("![f(a=1, b='x'), g()]", "", [call("f", '{"a": 1, "b": "x"}'), call("g", "{}")]),
        ("![ns.f( a = [1, {'k': True}] , )]", "", [call("ns.f", '{"a": [1, {"k": true}]}')]),
        ("![f(1)] x", "![f(1)] x", []),
        ("![f(a=1) x", " x", [call("f", '{"a": 1}')]),
        ("![f(a=x)]", "![f(a=x)]", []),
        ("![f(a=1, b=[x])]", ", b=[x])]", [call("f", '{"a": 1}', False)]),
        ("![f(a=[1, {'b': x])]", ", {'b': x])]", [call("f", '{"a": [1]}', False)]),
        ("![]", "![]", []),
    ],
)
def test_python_calls(text: str, content: str, calls: list[ToolCall]) -> None:
    message = parsed(PythonCalls, text)
    assert (message.content.strip(), message.tool_calls) == (content.strip(), calls)


TYPED = (tool("f", n="integer", o="object"),)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<f=f><p=s>\na\nb\n</p><p=n>7</p></f>", "", [call("f", '{"s": "a\\nb", "n": 7}')]),
        ("<f=f></f>", "", [call("f", "{}")]),
        ("<f=f> lost? <p=s>x</p> and </f>", " lost?  and ", [call("f", '{"s": "x"}')]),
        ("<f=f><p=o>{'a': None}</p></f>", "", [call("f", '{"o": {"a": null}}')]),
        ("<f=f><p=n>7<p=s>x</p></f>", "", [call("f", '{"n": 7, "s": "x"}')]),
        ("<f=f><p=n>7<p=>x</p></f>", "<p=>x</p>", [call("f", '{"n": 7}')]),
        ("<f=f><p=n>7", "", [call("f", '{"n": 7', False)]),
        ("<f=f><p=n>7</p>", "", [call("f", '{"n": 7}', False)]),
        ("<f=f>", "", [call("f", "{}", False)]),
        ("<f=f><p=s>x", "", [call("f", '{"s": "x', False)]),
        ("<f=two words>", "<f=two words>", []),
        ("<f=f><p=>x</p></f>", "<p=>x</p>", [call("f", "{}")]),
    ],
)
def test_tagged_calls(text: str, content: str, calls: list[ToolCall]) -> None:
    message = parsed(Tags, text, TYPED)
    assert (message.content, message.tool_calls) == (content, calls)


@pytest.mark.parametrize(
    ("value", "types", "expected"),
    [
        ("7", "string", "7"),
        ("7", "integer", 7),
        (" 7 ", "integer", 7),
        ("+7", "integer", 7),
        ("7.5", "integer", 7.5),
        ("1e3", "number", 1000.0),
        ("nan", "number", "nan"),
        ("true", "boolean", True),
        ("False", "boolean", False),
        ("0", "boolean", False),
        ("null", "null string", None),
        ("null", "string", "null"),
        ("[1]", "array", [1]),
        ("[1", "array", "[1"),
        ("{'a': 'b'}", "object", {"a": "b"}),
        ('{"a": 1}', "string object", {"a": 1}),
        ("x", "integer", "x"),
        ("9" * 30, "integer", int("9" * 30)),
        ("1.10", "number", 1.1),
        ('"x"', "integer", "x"),
    ],
)
def test_coercion(value: str, types: str, expected: Any) -> None:
    found = json.loads(coerce(value, frozenset(types.split())))
    assert found == expected and type(found) is type(expected)


def test_types_of_a_parameter() -> None:
    schema = {
        "properties": {
            "a": {"type": ["integer", "null"]},
            "b": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/D"}]},
            "c": {"enum": [1, "x", None, True]},
            "d": {},
            "e": {"$ref": "#/$defs/loop"},
        },
        "$defs": {"D": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    expected = [
        {"integer", "null"},
        {"string", "object"},
        {"integer", "string", "null", "boolean"},
        {"string"},
        {"string"},
        {"string"},
    ]
    assert [set(parameter_types(schema, key)) for key in "abcdez"] == expected


@given(st.text(st.sampled_from("<ab>/ "), max_size=50), places)
def test_prose_and_markers_are_the_text(text: str, marks: list[int]) -> None:
    """Nothing is a call, so the content, which includes the markers that were given back, is the
    text."""

    class Never(StreamParser):
        def read(self) -> Steps[None]:
            while (yield from self.prose(Markers("<a>", "<ab>", "/"))):
                yield from self.attempt(self._no())

        def _no(self) -> Steps[bool]:
            yield from self.text.space()
            return False

    assert fold(run(Never(), cut(text, marks))).content == text
