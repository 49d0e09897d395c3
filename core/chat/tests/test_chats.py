"""Parsing answers: whole and streamed answers give the same message, for every completion, with and
without parsers."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest

from pegboard.data.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from pegboard.errors import PegboardError, RequestError
from pegboard.interfaces.api import RequestOptions
from pegboard.interfaces.structured_output import Constraint
from pegboard.interfaces.tokenizer import Chat
from pegboard_chat.chats import ChatRequest, Chats
from pegboard_chat.parsing import constrained_calls, fold
from pegboard_testing.fake_client import FakeEngineClient
from pegboard_testing.fake_parsers import FakeReasoningParser, FakeToolParser

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
FINAL = RequestOutputKind.FINAL_ONLY
TEXTS = [
    '<think>hm é</think>Well <call add>{"x": 1}</call> and <call sub>{}</call>.',
    "plain </think",
    "<think>cut <call a",
]


def client(script=TEXTS, **more) -> FakeEngineClient:
    return FakeEngineClient(
        script, tool_parser=FakeToolParser, reasoning_parser=FakeReasoningParser, **more
    )


def asked(*tools, **fields) -> ChatRequest:
    """Make a request with one message. Fields of a chat are set on the chat."""
    names = ("add_generation_prompt", "continue_final_message", "chat_template", "template_kwargs")
    more = {name: fields.pop(name) for name in names if name in fields}
    return ChatRequest(
        chat=Chat(messages=[{"role": "user", "content": "hello"}], tools=tools or None, **more),
        **fields,
    )


def outputs_of(engine, request, params=None, settings=None):
    """Return all parsed outputs of one request."""

    async def run():
        outputs = await Chats(engine, settings).answer(
            request, params or SamplingParams(), RequestOptions(request_id="r")
        )
        return [output async for output in outputs]

    return asyncio.run(run())


def read(engine, request, kind, **params):
    """Return (messages by index, finish reasons) of one request."""
    events = {}
    ends = {}
    for parsed in outputs_of(
        engine, request, SamplingParams(max_tokens=200, output_kind=kind, **params)
    ):
        for completion in parsed.outputs:
            events.setdefault(completion.index, []).extend(parsed.events[completion.index])
            ends[completion.index] = completion.finish_reason
    return {index: fold(items) for index, items in events.items()}, ends


def prepared(engine, request, params=None, settings=None) -> SamplingParams:
    """Return the parameters that the engine gets."""
    outputs_of(engine, request, params, settings)
    return engine.requests[-1][1]


def shape(message):
    return (
        message.content,
        message.reasoning,
        [(call.name, call.arguments, call.is_complete) for call in message.tool_calls],
    )


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_stream_equals_whole(choice):
    request = asked(TOOL, tool_choice=choice)
    whole, ends = read(client(), request, RequestOutputKind.FINAL_ONLY, n=3)
    streamed, same_ends = read(client(), request, RequestOutputKind.DELTA, n=3)
    assert {i: shape(m) for i, m in whole.items()} == {i: shape(m) for i, m in streamed.items()}
    assert ends == same_ends == dict.fromkeys(range(3), "stop")
    calls = [("add", '{"x": 1}', True), ("sub", "{}", True)]
    texts = "Well  and .", 'Well <call add>{"x": 1}</call> and <call sub>{}</call>.'
    assert shape(whole[0]) == (
        (texts[0], "hm é", calls) if choice == "auto" else (texts[1], "hm é", [])
    )
    assert shape(whole[1])[0] == "plain </think"
    assert shape(whole[2])[1] == "cut <call a"


def test_what_parsers_are_told():
    """The tokenizer, and whether the answer is streamed."""
    setups = []

    class Listener(FakeToolParser):
        def __init__(self, options=None, setup=None):
            super().__init__(options, setup)
            setups.append(setup)

    engine = FakeEngineClient(TEXTS, tool_parser=partial(Listener, None))
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
        read(engine, asked(TOOL, tool_choice="auto"), kind)
    assert [setup.is_streamed for setup in setups] == [True, False]
    assert all(setup.tokenizer is engine.tokenizer() for setup in setups)


def test_one_call_only():
    whole, _ = read(
        client(),
        asked(TOOL, tool_choice="auto", parallel_tool_calls=False),
        RequestOutputKind.FINAL_ONLY,
    )
    assert [call.name for call in whole[0].tool_calls] == ["add"]


def test_no_parsers_leave_the_text():
    engine = FakeEngineClient(TEXTS)
    for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA):
        whole, _ = read(engine, asked(TOOL), kind)
        assert whole[0].content == TEXTS[0]


def test_forced_calls_get_a_schema_and_are_read_as_json():
    required = '[{"name": "add", "parameters": {"x": 1}}]'
    engine = FakeEngineClient(lambda prompt, index: required)
    for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA):
        whole, _ = read(engine, asked(TOOL, tool_choice="required"), kind)
        assert shape(whole[0]) == ("", "", [("add", '{"x": 1}', True)])
    schema = json.loads(engine.requests[-1][1].structured_outputs.json)
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == TOOL["function"]["parameters"]
    engine = FakeEngineClient('{"x": 2}')
    whole, _ = read(
        engine, asked(TOOL, tool_choice="named", function="add"), RequestOutputKind.DELTA
    )
    assert shape(whole[0]) == ("", "", [("add", '{"x": 2}', True)])
    assert (
        json.loads(engine.requests[-1][1].structured_outputs.json) == TOOL["function"]["parameters"]
    )


def test_strict_tools_are_held_to_the_format_of_the_parser():
    class Describing(FakeToolParser):
        def constraint(self, tools, choice):
            return Constraint("regex", "<call .*") if choice == "auto" else None

    strict = {"type": "function", "function": {"name": "add", "strict": True}}
    for parser, tool, expected in (
        (Describing, strict, "<call .*"),
        (Describing, TOOL, None),
        (FakeToolParser, strict, None),
    ):
        engine = FakeEngineClient(TEXTS, tool_parser=parser)
        wanted = prepared(engine, asked(tool, tool_choice="auto")).structured_outputs
        assert (wanted and wanted.regex) == expected


@pytest.mark.parametrize(("marker", "has_token"), [("<call>", False), ("<s>", True)])
def test_special_tokens_are_tokens_in_the_grammar(marker, has_token):
    """A constraint on text would forbid special tokens, so the model could not make calls."""

    class Describing(FakeToolParser):
        def constraint(self, tools, choice):
            return constrained_calls(tools, lambda name: f"{marker}{name}", "", [marker])

    strict = {"type": "function", "function": {"name": "add", "strict": True}}
    engine = FakeEngineClient(TEXTS, tool_parser=Describing)
    wanted = prepared(engine, asked(strict, tool_choice="auto")).structured_outputs
    tag = json.loads(wanted.structural_tag)
    assert ("structures" in tag) != has_token
    if has_token:
        (made,) = tag["format"]["tags"]
        assert made["begin"]["type"] == "token" and made["content"]["elements"][0]["value"] == "add"


@pytest.mark.parametrize(
    ("stop", "holds_at_once"), [("<call ", True), ("<other ", False), (None, False)]
)
def test_a_call_made_out_of_the_reasoning_is_held_where_it_ends_the_reasoning(stop, holds_at_once):
    class Describing(FakeToolParser):
        def constraint(self, tools, choice):
            return constrained_calls(tools, lambda name: f"<call {name}>", "", ["<call "])

    class Ending(FakeReasoningParser):
        def reasoning_end(self):
            return ("</think>", stop) if stop else ("</think>",)

    strict = {"type": "function", "function": {"name": "add", "strict": True}}
    engine = FakeEngineClient(TEXTS, tool_parser=Describing, reasoning_parser=Ending)
    wanted = prepared(engine, asked(strict, tool_choice="auto")).structured_outputs
    assert wanted.structural_tag and (wanted.reasoning_end_token_ids == []) == holds_at_once


def test_forced_calls_have_the_ids_of_the_model():
    engine = FakeEngineClient('[{"name": "add", "parameters": {}}]', tool_parser=FakeToolParser)
    whole, _ = read(engine, asked(TOOL, tool_choice="required"), RequestOutputKind.FINAL_ONLY)
    assert [call.id for call in whole[0].tool_calls] == ["call-0"]
    engine = FakeEngineClient("{}")
    whole, _ = read(
        engine, asked(TOOL, tool_choice="named", function="add"), RequestOutputKind.FINAL_ONLY
    )
    assert whole[0].tool_calls[0].id.startswith("chatcmpl-tool-")


JSON = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))


@pytest.mark.parametrize(
    ("request_", "params", "parameter", "why"),
    [
        (asked(tool_choice="required"), None, "tool_choice", "needs tools"),
        (asked(tool_choice="auto"), None, "tool_choice", "needs tools"),
        (asked(tool_choice="named", function="add"), None, "tool_choice", "needs tools"),
        (asked(TOOL, tool_choice="named", function="sub"), None, "tool_choice", "'sub'"),
        (asked(TOOL, tool_choice="required"), JSON, "tool_choice", "exclude each other"),
        (asked(TOOL, tool_choice="auto"), None, "tool_choice", "no tool parser is known"),
        (asked(chat_template="x"), None, "chat_template", "--trust-request-chat-template"),
        (
            asked(template_kwargs={"tools": []}),
            None,
            "chat_template_kwargs",
            "must not hold 'tools'",
        ),
        (asked(template_kwargs={"fail": True}), None, "messages", "asked to fail"),
    ],
)
def test_refusals_before_anything_runs(request_, params, parameter, why):
    engine = FakeEngineClient()
    with pytest.raises(RequestError, match=why) as caught:
        outputs_of(engine, request_, params)
    assert caught.value.parameter == parameter and not engine.requests


def test_calls_are_read_unless_the_server_or_the_request_says_no():
    settings = {"enable_auto_tool_choice": False}
    for engine, given, expected in (
        (client(), None, "auto"),
        (client(), settings, "none"),
        (FakeEngineClient(), None, "none"),
    ):
        chats = Chats(engine, given)
        assert chats.tool_choice(asked(TOOL)) == expected and chats.can_read_calls == (
            expected == "auto"
        )
        assert (
            chats.tool_choice(asked())
            == chats.tool_choice(asked(TOOL, tool_choice="none"))
            == "none"
        )
    with pytest.raises(RequestError, match="no-enable-auto-tool-choice"):
        outputs_of(client(), asked(TOOL, tool_choice="auto"), settings=settings)


def test_the_prompt_is_what_the_template_writes():
    """Tools are hidden only if the server's setting says so and the request wants no calls."""
    hides = {"exclude_tools_when_tool_choice_none": True}
    for settings, choice, is_shown in (
        (hides, "none", False),
        (hides, None, True),
        (None, "none", True),
    ):
        engine = client()
        request = asked(TOOL, tool_choice=choice, cache_salt="s")
        outputs_of(engine, request, settings=settings)
        prompt = engine.requests[-1][0]
        text = engine.tokenizer().decode(prompt.token_ids, skip_special_tokens=False)
        assert (
            text == "[tools 1]" * is_shown + "user: hello\nassistant: " and prompt.cache_salt == "s"
        )
        assert asyncio.run(Chats(engine, settings).token_ids(request)) == prompt.token_ids
        assert prompt.chat is not None, "the engine finds the end of the reasoning by this text"


def test_beams_are_read_too():
    from pegboard.data.sampling_params import BeamSearchParams

    engine = client("<think>a</think>b")
    (output,) = outputs_of(engine, asked(), BeamSearchParams(beam_width=2, max_tokens=3))
    assert sorted(output.events) == [0, 1] and all(output.events.values())


def test_a_completion_that_the_engine_gave_up_is_an_error():
    class Failing(FakeEngineClient):
        async def generate(self, prompt, params, request):
            async for output in super().generate(prompt, params, request):
                output.outputs[0].finish_reason = "error"
                yield output

    with pytest.raises(PegboardError, match="failed in the engine"):
        outputs_of(Failing("x"), asked())


def test_a_parser_that_raises_is_the_error_of_its_request():
    class Broken(FakeToolParser):
        def feed(self, text, token_ids):
            raise ZeroDivisionError

    engine = FakeEngineClient(TEXTS, tool_parser=Broken)
    with pytest.raises(PegboardError, match="Broken"):
        read(engine, asked(TOOL), RequestOutputKind.FINAL_ONLY)


def test_special_tokens_are_kept_for_a_parser_that_reads_them_and_then_hidden():
    engine = client("a<s>b", reads_special=True)
    assert prepared(engine, asked(TOOL)).skip_special_tokens is False
    assert prepared(engine, asked(TOOL, tool_choice="none")).skip_special_tokens is True
    for skips, expected in ((True, "ab"), (False, "a<s>b</s>")):
        (output,) = outputs_of(
            engine,
            asked(TOOL),
            SamplingParams(skip_special_tokens=skips, output_kind=FINAL, max_tokens=20),
        )
        assert fold(output.events[0]).content == expected


@pytest.mark.parametrize("kind", [{"pools": True}, {"labels": ("good", "bad")}])
def test_a_model_that_makes_vectors_says_so(kind):
    with pytest.raises(RequestError, match="this model makes vectors and does not answer chats"):
        outputs_of(client(**kind), asked())
