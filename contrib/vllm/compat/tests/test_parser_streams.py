"""Streams go through the streaming methods of vLLM's parsers."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pegboard_vllm_compat import parser_adapter
from pegboard_vllm_compat.parser_adapter import (
    ParserTokenizer,
    VllmReasoningParser,
    VllmToolParser,
)
from pegboard_vllm_compat.parser_stream import Answer, argument_tail, tail

from pegboard.data.sampling_params import RequestOutputKind, SamplingParams
from pegboard.interfaces.api import RequestOptions
from pegboard.interfaces.output_parser import (
    Content,
    OutputParserSetup,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from pegboard.interfaces.tokenizer import Chat, Vocabulary
from pegboard_chat.chats import ChatRequest, Chats
from pegboard_testing.fake_client import FakeEngineClient

pytestmark = pytest.mark.usefixtures("vllm_in_module")

HERE = Path(__file__).parent
VOCABULARY = Vocabulary((b"a", b"b", b""), frozenset({2}), (2,))
WHOLE = OutputParserSetup(VOCABULARY)
STREAM = OutputParserSetup(VOCABULARY, is_streamed=True)
TEXT = 'Well, <b>. <call>f {"x": 1}</call><call>go {"place": "</c"}</call>'


class Tool(VllmToolParser):
    target = str(HERE / "vllm_stream_parsers.py")
    name = "streamer"
    shadow = True


class Fails(Tool):
    name = "fails"


class Differs(Tool):
    name = "differs"


class Silent(Tool):
    """Its streaming method returns nothing."""

    target = str(HERE / "vllm_parsers.py")
    name = "example"


class Thought(VllmReasoningParser):
    target = str(HERE / "vllm_parsers.py")
    name = "example"
    shadow = True


def events(parser: Any, *pieces: str) -> list[Any]:
    fed = [event for number, piece in enumerate(pieces) for event in parser.feed(piece, (number,))]
    return fed + parser.finish()


def facts(read: list[Any]) -> Any:
    answer = Answer(read)
    calls = [(call.name, call.arguments) for call in answer.calls]
    return answer.reasoning, answer.content, calls


def test_several_pieces() -> None:
    pieces = ["We", "ll <ca", "ll>f ", '{"x', '": 1}</call>', "<call>g {}", "</call>"]
    assert events(Tool(None, STREAM), *pieces) == [
        Content("We"),
        Content("ll "),
        ToolCallStart(0, "call-0", "f"),
        ToolCallArguments(0, '{"x'),
        ToolCallArguments(0, '": 1}'),
        ToolCallEnd(0),
        ToolCallStart(1, "call-1", "g"),
        ToolCallArguments(1, "{}"),
        ToolCallEnd(1),
    ]


@pytest.mark.parametrize("make", [Tool, Fails, Silent])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stream_says_what_the_whole_answer_says(make: type[Tool], size: int) -> None:
    """Also if its streaming method fails or returns nothing."""
    text = '"<call>{"name": "f", "arguments": {"x": 1}}' if make is Silent else TEXT
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    assert facts(events(make(None, STREAM), *pieces)) == facts(events(make(None, WHOLE), text))


@given(st.lists(st.integers(0, len(TEXT)), max_size=8), st.integers(0, len(TEXT)))
def test_random_cuts(places: list[int], length: int) -> None:
    """Of answers that may break off."""
    text = TEXT[:length]
    places = sorted(place for place in places if place <= length)
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, length], strict=True)]
    streamed = events(Tool(None, STREAM), *pieces)
    assert facts(streamed) == facts(events(Tool(None, WHOLE), text))
    starts = [one.index for one in streamed if isinstance(one, ToolCallStart)]
    assert starts == [one.index for one in streamed if isinstance(one, ToolCallEnd)]


@given(st.lists(st.sampled_from(["<why>", "</why>", "<w", "hy>", "</", "so ", "why"]), max_size=7))
def test_random_reasoning(pieces: list[str]) -> None:
    streamed = facts(events(Thought(None, STREAM), *pieces))
    assert streamed == facts(events(Thought(None, WHOLE), "".join(pieces)))


def test_reasoning_comes_in_pieces() -> None:
    parsed = events(Thought(None, STREAM), "<why>", "so ", "it", "</why>", "yes", "!")
    assert parsed == [Reasoning("so "), Reasoning("it"), Content("yes"), Content("!")]


def test_what_was_sent_stands(caplog: pytest.LogCaptureFixture) -> None:
    """And the warning comes once."""
    parser_adapter._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert facts(events(Differs(None, STREAM), "so ", "it")) == ("", "SO IT", [])
    assert [one.getMessage().split(" differs ")[1] for one in caplog.records] == [
        "says something else in streams than of whole answers"
    ]


def test_tails() -> None:
    assert tail("so ", "so it is") == "it is"
    assert tail("\nso ", "so") == ""
    assert tail("no", "so") is None
    assert argument_tail('{"x":1}', '{"x": 1}') == ""
    assert argument_tail('{"x":', '{"x": 1}') == " 1}"
    assert argument_tail('{"y":', '{"x": 1}') is None


@pytest.mark.parametrize("thinks", [False, True])
def test_a_chat_gets_several_pieces(thinks: bool) -> None:
    """Also after a reasoning parser, and the message is that of the whole answer."""
    text = ("<why>so</why>" if thinks else "") + TEXT
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    chat = Chat(messages=[{"role": "user", "content": "Hi"}], tools=[tool])
    request = ChatRequest(chat=chat, tool_choice="auto")
    client = FakeEngineClient(
        [text],
        tool_parser=partial(Tool, None),
        reasoning_parser=partial(Thought, None) if thinks else None,
    )

    async def answer(kind: RequestOutputKind) -> list[list[Any]]:
        params = SamplingParams(max_tokens=200, output_kind=kind)
        outputs = await Chats(client).answer(request, params, RequestOptions(request_id="r"))
        return [output.events[0] async for output in outputs if output.events.get(0)]

    (whole,) = asyncio.run(answer(RequestOutputKind.FINAL_ONLY))
    pieces = asyncio.run(answer(RequestOutputKind.DELTA))
    assert len(pieces) > 5
    assert facts([event for piece in pieces for event in piece]) == facts(whole)
    assert facts(whole)[2] == [("f", '{"x": 1}'), ("go", '{"place": "</c"}')]


class Letters:
    """A tokenizer with a token per letter, and a special one."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return ["ab".index(letter) for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(("a", "b", "<call>")[token] for token in token_ids)


def test_the_tokenizer_of_parsers() -> None:
    tokenizer = ParserTokenizer(VOCABULARY, Letters())  # type: ignore[arg-type]
    assert tokenizer.get_vocab() == {"a": 0, "b": 1, "<call>": 2}
    assert tokenizer.convert_tokens_to_ids(["b", "<call>"]) == [1, 2]
    assert tokenizer.encode("ab") == [0, 1] and tokenizer.decode(2) == "<call>"
    with pytest.raises(ValueError, match="not known"):
        ParserTokenizer(VOCABULARY).encode("a")
