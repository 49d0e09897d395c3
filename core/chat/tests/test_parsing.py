"""Parsers and their common parts: any chunking of the text gives the same message, and nothing is
lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.errors import PluginFailure
from pegboard.interfaces.output_parser import Content, Event, ToolCallArguments
from pegboard_chat.parsing import MarkerScanner, Message, Pipeline, ToolCall, fold, merged
from pegboard_testing.fake_parsers import FakeReasoningParser, FakeToolParser

PIECES = [
    "<think>",
    "</think>",
    "<call ",
    "add",
    ">",
    '{"x": 1}',
    "</call>",
    "<",
    "text",
    "é🚀",
    " ",
    "</",
]
texts = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    marks = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in zip(marks, marks[1:], strict=False)]


def parse(pieces: list[str]) -> Message:
    pipeline = Pipeline(FakeReasoningParser(), FakeToolParser())
    events: list[Event] = [event for piece in pieces for event in pipeline.feed(piece, ())]
    return fold(events + pipeline.finish())


def test_a_message_with_everything() -> None:
    text = '<think>2+2?</think>Let me see. <call add>{"x": 2}</call> and <call neg>{}</call>done'
    assert parse([text]) == Message(
        content="Let me see.  and done",
        reasoning="2+2?",
        tool_calls=[
            ToolCall("call_0", "add", '{"x": 2}', True),
            ToolCall("call_1", "neg", "{}", True),
        ],
    )


@given(texts, st.lists(st.integers(0, 500), max_size=30))
def test_any_chunking_gives_the_same_message(text: str, places: list[int]) -> None:
    assert parse(cut(text, places)) == parse([text]) == parse(list(text))


@given(texts)
def test_without_parsers_text_is_content(text: str) -> None:
    pipeline = Pipeline()
    assert fold(pipeline.feed(text, ()) + pipeline.finish()).content == text


@given(st.text("<ab>/", max_size=60), st.lists(st.integers(0, 500), max_size=30))
def test_scanner_loses_nothing(text: str, places: list[int]) -> None:
    """The joined pieces and markers are the text, and plain pieces contain no marker."""
    markers = ["<a>", "<ab>", "/"]
    scanner = MarkerScanner(markers)
    found = [pair for piece in cut(text, places) for pair in scanner.scan(piece)]
    joined = "".join(piece for piece, _ in found) + scanner.flush()
    assert joined == text
    assert all(piece in markers for piece, is_marker in found if is_marker)
    assert not any(
        marker in piece for piece, is_marker in found if not is_marker for marker in markers
    )


def test_calls_cut_off_at_the_end() -> None:
    assert parse(["a<call ad"]) == Message(content="a<call ad")
    assert parse(["<call add>{"]).tool_calls == [ToolCall("call_0", "add", "{", False)]


def test_a_parser_that_raises_is_named() -> None:
    class Broken(FakeToolParser):
        def feed(self, text: str, token_ids: object) -> list[Event]:
            raise KeyError(text)

    with pytest.raises(PluginFailure, match="Broken"):
        Pipeline(None, Broken()).feed("x", ())
    assert Pipeline().feed("", ()) == []
    assert isinstance(Pipeline().feed("x", ())[0], Content)


def test_an_empty_text_separates_nothing() -> None:
    events = [ToolCallArguments(0, "a"), ToolCallArguments(0, ""), ToolCallArguments(0, "b")]
    assert merged(events) == [ToolCallArguments(0, "ab")]
    assert merged([Content("")]) == []
