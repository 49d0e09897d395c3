"""Tool calls and reasoning in chats: shapes, streams equal to whole answers, tool choices, and the
input of the template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pegboard.data.sampling_params import RequestOutputKind
from pegboard_testing.fake_parsers import FakeReasoningParser, FakeToolParser

PARSERS = {"tool_parser": FakeToolParser, "reasoning_parser": FakeReasoningParser}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
TEXT = '<think>hm é</think>So: <call add>{"x": 1}</call><call add>{"x": 2}</call>'


def joined(events: list[Any], index: int = 0) -> dict[str, Any]:
    """Joins the deltas of one choice into a message, like OpenAI's clients."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish_reason": None}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                known = message["calls"].setdefault(
                    call["index"], {"id": call.get("id"), "name": "", "arguments": ""}
                )
                known["name"] += call["function"].get("name", "")
                known["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
    return message


@pytest.mark.parametrize(
    "fields",
    [{}, {"include_reasoning": False}, {"parallel_tool_calls": False}, {"tool_choice": "none"}],
)
def test_stream_joined_equals_whole(http, fields):
    server = http([TEXT, "no calls", "<think>only"], PARSERS)
    fields = {"tools": [ADD], "n": 3, **fields}
    whole = server.chat(**fields)
    events = server.chat(stream=True, **fields)
    for choice in whole["choices"]:
        message = choice["message"]
        parts = joined(events, choice["index"])
        assert parts["content"] == (message["content"] or "") and parts["reasoning"] == (
            message["reasoning"] or ""
        )
        assert message["reasoning_content"] == message["reasoning"]
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message["tool_calls"]
        ]
        assert [(call["name"], call["arguments"]) for call in parts["calls"].values()] == calls
        assert parts["finish_reason"] == choice["finish_reason"]


def test_a_call_of_the_models_choice(http):
    server = http(TEXT, PARSERS)
    (choice,) = server.chat(tools=[ADD])["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and (
        message["content"],
        message["reasoning"],
    ) == ("So: ", "hm é")
    assert [call["type"] for call in message["tool_calls"]] == ["function"] * 2
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [
        {"x": 1},
        {"x": 2},
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    events = server.chat(stream=True, tools=[ADD])
    firsts = [
        call
        for event in events
        for call in event["choices"][0]["delta"].get("tool_calls", ())
        if "id" in call
    ]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in firsts] == [
        (0, "function", "add"),
        (1, "function", "add"),
    ]


def test_content_is_null_beside_calls_and_reasoning(http):
    whole = http(['<call add>{"x": 1}</call>', "<think>a</think>"], PARSERS).chat(tools=[ADD], n=2)
    assert [choice["message"]["content"] for choice in whole["choices"]] == [None, None]
    assert http("").chat()["choices"][0]["message"]["content"] == ""


def test_cut_off_calls_end_with_length(http):
    (choice,) = http(TEXT, PARSERS).chat(tools=[ADD], max_tokens=len(TEXT.encode()) - 30)["choices"]
    assert choice["finish_reason"] == "length" and len(choice["message"]["tool_calls"]) == 1


def test_hidden_reasoning_hides_its_tokens(http):
    fields = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    server = http(TEXT, PARSERS)
    (choice,) = server.chat(**fields)["choices"]
    assert (choice["message"]["reasoning"], choice["logprobs"], choice["token_ids"]) == (
        None,
        None,
        None,
    )
    chunks = [choice for event in server.chat(stream=True, **fields) for choice in event["choices"]]
    assert all(chunk["logprobs"] is None and "token_ids" not in chunk for chunk in chunks)
    assert not any("reasoning" in chunk["delta"] for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "script", "reason"),
    [
        ("required", ' [{"name": "add", "parameters": {"x": 3}}]', "tool_calls"),
        ({"type": "function", "function": {"name": "add"}}, '{"x": 3}', "stop"),
    ],
)
def test_forced_calls_need_no_parser(http, choice, script, reason, stream):
    server = http(script)
    answer = server.chat(tools=[ADD], tool_choice=choice, stream=stream)
    if stream:
        message = joined(answer)
        assert (message["content"], message["finish_reason"]) == ("", reason)
        assert [(c["name"], json.loads(c["arguments"])) for c in message["calls"].values()] == [
            ("add", {"x": 3})
        ]
        assert message["calls"][0]["id"].startswith("chatcmpl-tool-")
    else:
        (whole,) = answer["choices"]
        assert whole["finish_reason"] == reason and whole["message"]["content"] is None
        (call,) = whole["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "add",
            {"x": 3},
        )
    params = server.engine.requests[0][1]
    assert params.structured_outputs is not None
    assert params.output_kind is (
        RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    )


def test_tools_without_a_parser_are_shown_and_answered_as_text(http):
    server = http(TEXT)
    (choice,) = server.chat(tools=[ADD])["choices"]
    assert (
        choice["message"]["content"],
        choice["message"]["tool_calls"],
        choice["finish_reason"],
    ) == (TEXT, [], "stop")
    assert prompt_of(server).startswith("[tools 1]")


def prompt_of(server) -> str:
    prompt = server.engine.requests[-1][0]
    return server.engine.tokenizer().decode(prompt.token_ids, skip_special_tokens=False)


def test_tools_are_hidden_from_the_model_on_request(http):
    for hides in (False, True):
        server = http(TEXT, PARSERS, exclude_tools_when_tool_choice_none=hides)
        server.chat(tools=[ADD], tool_choice="none")
        assert prompt_of(server).startswith("[tools 1]") is not hides
        server.chat(tools=[ADD])
        assert prompt_of(server).startswith("[tools 1]")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice", "none, auto, required"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function"}},
            "tool_choice",
            "named tool|function",
        ),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
            "'sub'",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]},
            "tools[0].function.parameters",
            "schema",
        ),
    ],
)
def test_refusals(http, fields, param, words):
    import re

    error = http(TEXT, PARSERS).chat(status=400, **fields)["error"]
    assert error["param"] == param and re.search(words, error["message"])


def test_thinking_and_calls_of_earlier_turns_reach_the_template(http, monkeypatch):
    server = http("ok", PARSERS)
    seen = []
    tokenizer = server.engine.tokenizer()
    render = tokenizer.render
    monkeypatch.setattr(tokenizer, "render", lambda chat: (seen.append(chat), render(chat))[1])
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"x": [1, {"y": null}]}'},
    }
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "reasoning": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
        {"role": "assistant", "reasoning_content": "So it is 2.", "content": "2", "tool_calls": []},
        {"role": "user", "content": "Thanks."},
    ]
    server.post("/v1/chat/completions", {"messages": messages, "tools": [ADD]})
    (chat,) = seen
    assert chat.tools == [ADD]
    assert (
        chat.messages[1]["reasoning"] == "I add."
        and chat.messages[3]["reasoning_content"] == "So it is 2."
    )
    assert chat.messages[1]["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": {"x": [1, {"y": None}]},
    }
    assert (
        chat.messages[2] == {"role": "tool", "tool_call_id": "c1", "content": "2"}
        and "tool_calls" not in chat.messages[3]
    )


def test_auto_can_be_switched_off(http):
    server = http(TEXT, PARSERS, enable_auto_tool_choice=False)
    assert server.chat(tools=[ADD])["choices"][0]["message"]["tool_calls"] == []
    assert (
        "no-enable-auto-tool-choice"
        in server.chat(tools=[ADD], tool_choice="auto", status=400)["error"]["message"]
    )


def test_effort_and_switches_reach_template_and_parsers(http):
    seen = []

    class Spy(FakeReasoningParser):
        def __init__(self, setup):
            super().__init__(None, setup)
            seen.append((dict(setup.template_kwargs), setup.prompt_end))

    server = http(TEXT, {"reasoning_parser": Spy})
    server.chat(reasoning_effort="none", chat_template_kwargs={"budget": 3})
    server.chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert [kwargs for kwargs, _ in seen] == [
        {"reasoning_effort": "none", "enable_thinking": False, "budget": 3},
        {"reasoning_effort": "low", "enable_thinking": False},
    ]
    assert seen[0][1].endswith("user: hello\nassistant: ")
