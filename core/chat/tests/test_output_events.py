"""Reading answers: the whole and the stream are the same fold, for every completion, with and without parsers."""

from __future__ import annotations

import asyncio
import json

import pytest

from pegboard.data.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from pegboard.errors import PegboardError, RequestError
from pegboard.interfaces.api import Parsing, Prompt, RequestOptions
from pegboard.interfaces.output_parser import Content
from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing import constrained_calls, fold
from pegboard_testing.fake_client import FakeEngineClient
from pegboard_testing.fake_parsers import FakeReasoningParser, FakeToolParser

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
TEXTS = ['<think>hm é</think>Well <call add>{"x": 1}</call> and <call sub>{}</call>.', "plain </think", "<think>cut <call a"]


def client(script=TEXTS, **more) -> FakeEngineClient:
    return FakeEngineClient(script, tool_parser=FakeToolParser, reasoning_parser=FakeReasoningParser, **more)


def read(engine, parsing, kind, **params):
    """(messages by index, finish reasons) of one request."""

    async def run():
        prepared = engine.prepare(SamplingParams(max_tokens=200, output_kind=kind, **params), parsing, [1])
        outputs = engine.generate(Prompt(text="hello"), prepared, RequestOptions(request_id="r"))
        events, ends = {}, {}
        async for parsed in engine.events(outputs, parsing):
            for completion in parsed.outputs:
                events.setdefault(completion.index, []).extend(parsed.events[completion.index])
                ends[completion.index] = completion.finish_reason
        return {index: fold(items) for index, items in events.items()}, ends

    return asyncio.run(run())


def shape(message):
    return message.content, message.reasoning, [(call.name, call.arguments, call.is_complete) for call in message.tool_calls]


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_stream_equals_whole(choice):
    parsing = Parsing(tools=[TOOL], tool_choice=choice)
    whole, ends = read(client(), parsing, RequestOutputKind.FINAL_ONLY, n=3)
    streamed, same_ends = read(client(), parsing, RequestOutputKind.DELTA, n=3)
    assert {i: shape(m) for i, m in whole.items()} == {i: shape(m) for i, m in streamed.items()}
    assert ends == same_ends == dict.fromkeys(range(3), "stop")
    calls = [("add", '{"x": 1}', True), ("sub", "{}", True)]
    texts = "Well  and .", 'Well <call add>{"x": 1}</call> and <call sub>{}</call>.'
    assert shape(whole[0]) == ((texts[0], "hm é", calls) if choice == "auto" else (texts[1], "hm é", []))
    assert shape(whole[1])[0] == "plain </think"
    assert shape(whole[2])[1] == "cut <call a"


def test_one_call_only():
    whole, _ = read(client(), Parsing(tools=[TOOL], tool_choice="auto", parallel_tool_calls=False), RequestOutputKind.FINAL_ONLY)
    assert [call.name for call in whole[0].tool_calls] == ["add"]


def test_no_parsers_leave_the_text():
    engine = FakeEngineClient(TEXTS)
    assert engine.parsers() == {"tool_parser": None, "reasoning_parser": None}
    for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA):
        whole, _ = read(engine, Parsing(tools=[TOOL], tool_choice="auto"), kind)
        assert whole[0].content == TEXTS[0]


def test_forced_calls_get_a_schema_and_are_read_as_json():
    required = '[{"name": "add", "parameters": {"x": 1}}]'
    engine = FakeEngineClient(lambda prompt, index: required)
    for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA):
        whole, _ = read(engine, Parsing(tools=[TOOL], tool_choice="required"), kind)
        assert shape(whole[0]) == ("", "", [("add", '{"x": 1}', True)])
    schema = json.loads(engine.requests[-1][1].structured_outputs.json)
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == TOOL["function"]["parameters"]
    engine = FakeEngineClient('{"x": 2}')
    whole, _ = read(engine, Parsing(tools=[TOOL], tool_choice="named", function="add"), RequestOutputKind.DELTA)
    assert shape(whole[0]) == ("", "", [("add", '{"x": 2}', True)])
    assert json.loads(engine.requests[-1][1].structured_outputs.json) == TOOL["function"]["parameters"]


def test_strict_tools_are_held_to_the_format_of_the_parser():
    class Describing(FakeToolParser):
        def constraint(self, tools, choice):
            return Constraint("regex", "<call .*") if choice == "auto" else None

    strict = {"type": "function", "function": {"name": "add", "strict": True}}
    for parser, tool, expected in ((Describing, strict, "<call .*"), (Describing, TOOL, None), (FakeToolParser, strict, None)):
        engine = FakeEngineClient(TEXTS, tool_parser=parser)
        wanted = engine.prepare(SamplingParams(), Parsing(tools=[tool], tool_choice="auto"), [1]).structured_outputs
        assert (wanted and wanted.regex) == expected


@pytest.mark.parametrize(("marker", "has_token"), [("<call>", False), ("<s>", True)])
def test_special_tokens_are_tokens_in_the_grammar(marker, has_token):
    """As text it would forbid them: the model could not call any more."""

    class Describing(FakeToolParser):
        def constraint(self, tools, choice):
            return constrained_calls(tools, lambda name: f"{marker}{name}", "", [marker])

    strict = {"type": "function", "function": {"name": "add", "strict": True}}
    engine = FakeEngineClient(TEXTS, tool_parser=Describing)
    wanted = engine.prepare(SamplingParams(), Parsing(tools=[strict], tool_choice="auto"), [1]).structured_outputs
    tag = json.loads(wanted.structural_tag)
    assert ("structures" in tag) != has_token
    if has_token:
        (made,) = tag["format"]["tags"]
        assert made["begin"]["type"] == "token" and made["content"]["elements"][0]["value"] == "add"


@pytest.mark.parametrize(("stop", "holds_at_once"), [("<call ", True), ("<other ", False), (None, False)])
def test_a_call_made_out_of_the_reasoning_is_held_where_it_ends_the_reasoning(stop, holds_at_once):
    class Describing(FakeToolParser):
        def constraint(self, tools, choice):
            return constrained_calls(tools, lambda name: f"<call {name}>", "", ["<call "])

    class Ending(FakeReasoningParser):
        def reasoning_end(self):
            return ("</think>", stop) if stop else ("</think>",)

    strict = {"type": "function", "function": {"name": "add", "strict": True}}
    engine = FakeEngineClient(TEXTS, tool_parser=Describing, reasoning_parser=Ending)
    wanted = engine.prepare(SamplingParams(), Parsing(tools=[strict], tool_choice="auto"), [1]).structured_outputs
    assert wanted.structural_tag and (wanted.reasoning_end_token_ids == []) == holds_at_once
    answer = engine.prepare(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")), Parsing(), [1])
    assert answer.structured_outputs.reasoning_end_token_ids


def test_forced_calls_have_the_ids_of_the_model():
    engine = FakeEngineClient('[{"name": "add", "parameters": {}}]', tool_parser=FakeToolParser)
    whole, _ = read(engine, Parsing(tools=[TOOL], tool_choice="required"), RequestOutputKind.FINAL_ONLY)
    assert [call.id for call in whole[0].tool_calls] == ["call-0"]
    engine = FakeEngineClient("{}")
    whole, _ = read(engine, Parsing(tools=[TOOL], tool_choice="named", function="add"), RequestOutputKind.FINAL_ONLY)
    assert whole[0].tool_calls[0].id.startswith("chatcmpl-tool-")


@pytest.mark.parametrize(
    ("parsing", "why"),
    [
        (Parsing(tool_choice="required"), "needs tools"),
        (Parsing(tool_choice="named", function="add"), "needs tools"),
        (Parsing(tools=[TOOL], tool_choice="named", function="sub"), "'sub'"),
        (Parsing(tools=[TOOL], tool_choice="required"), "exclude each other"),
    ],
)
def test_refusals(parsing, why):
    with pytest.raises(RequestError, match=why):
        FakeEngineClient().prepare(SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)), parsing, [1])


def test_a_parser_that_raises_is_the_error_of_its_request():
    class Broken(FakeToolParser):
        def feed(self, text, token_ids):
            raise ZeroDivisionError

    engine = FakeEngineClient(TEXTS, tool_parser=Broken)
    with pytest.raises(PegboardError, match="Broken"):
        read(engine, Parsing(tools=[TOOL], tool_choice="auto"), RequestOutputKind.FINAL_ONLY)


def test_structured_output_waits_for_the_end_of_reasoning():
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    forced = Parsing(tools=[TOOL], tool_choice="required")
    for engine, expected in ((client(), [list(b"</think>")]), (FakeEngineClient(), None)):
        assert engine.prepare(wanted, Parsing(), [1]).structured_outputs.reasoning_end_token_ids == expected
        assert engine.prepare(SamplingParams(), forced, [1]).structured_outputs.reasoning_end_token_ids == expected
        assert engine.prepare(SamplingParams(), Parsing(), [1]).structured_outputs is None
    assert wanted.structured_outputs.reasoning_end_token_ids is None


def test_special_tokens_are_kept_for_a_parser_that_reads_them_and_then_hidden():
    from pegboard_chat.output_events import OutputReader, ParserMaker
    from pegboard_testing.fake_client import ByteTokenizer

    engine = client("unused")
    engine._reader = OutputReader(ByteTokenizer(), ParserMaker("fake", FakeToolParser, reads_special=True))
    parsing = Parsing(tools=[TOOL], tool_choice="auto")
    assert engine.prepare(SamplingParams(), parsing, [1]).skip_special_tokens is False
    assert engine.prepare(SamplingParams(), Parsing(tools=[TOOL]), [1]).skip_special_tokens is True
    for shows, expected in ((True, "ab"), (False, "a<s>b")):

        async def run(parsing):
            from pegboard.data.output import CompletionOutput, RequestOutput

            async def outputs():
                yield RequestOutput("r", None, [1], [CompletionOutput(0, "a<s>b", [], finish_reason="stop")], True)

            return [event async for parsed in engine.events(outputs(), parsing) for event in parsed.events[0]]

        parsing = Parsing(tools=[TOOL], tool_choice="auto", skip_special_tokens=shows)
        assert asyncio.run(run(parsing)) == [Content(expected)]
