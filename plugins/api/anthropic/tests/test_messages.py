"""POST /v1/messages: blocks, the stream's events, the input of the template, and refusals."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from pegboard_api_anthropic.api import AnthropicApi
from pegboard_api_anthropic.conversation import read_messages
from pegboard_api_anthropic.plugin import ANTHROPIC
from starlette.testclient import TestClient

from pegboard.interfaces.api import ApiSetup
from pegboard_testing.contract_api import ApiContract
from pegboard_testing.fake_client import FakeEngineClient
from pegboard_testing.fake_parsers import FakeReasoningParser, FakeToolParser
from pegboard_testing.served_app import make_app

ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
TEXT = '<think>hm é</think>So: <call add>{"x": 1}</call><call add>{"x": 2}</call>'
HELLO = [{"role": "user", "content": "hello"}]


def apis(setup: ApiSetup) -> Any:
    return [("anthropic", AnthropicApi(None, setup), ANTHROPIC)]


class Messages:
    """A client of one app."""

    def __init__(
        self,
        script: Any = TEXT,
        *,
        parsers: bool = True,
        engine: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        more = (
            {"tool_parser": FakeToolParser, "reasoning_parser": FakeReasoningParser}
            if parsers
            else {}
        )
        self.engine = FakeEngineClient(script, **more, **(engine or {}))
        self.client = TestClient(
            make_app(apis, self.engine, **settings), raise_server_exceptions=False
        )

    def create(
        self, messages: Any = None, *, status: int = 200, path: str = "/v1/messages", **fields: Any
    ) -> Any:
        body = {
            "model": "fake-model",
            "max_tokens": 500,
            "messages": HELLO if messages is None else messages,
            **fields,
        }
        response = self.client.post(
            path, json={name: value for name, value in body.items() if value is not ...}
        )
        assert response.status_code == status, response.text
        return (
            read_events(response.text)
            if fields.get("stream") and status == 200
            else response.json()
        )

    def prompt(self) -> str:
        return self.engine.tokenizer().decode(
            self.engine.requests[-1][0].token_ids, skip_special_tokens=False
        )


def read_events(text: str) -> list[Any]:
    events = []
    for block in filter(None, text.split("\n\n")):
        kind, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


def without_ids(content: list[Any]) -> list[Any]:
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


def test_a_message_is_blocks():
    server = Messages()
    message = server.create(tools=[ADD])
    assert message["id"].startswith("msg_") and (message["type"], message["role"]) == (
        "message",
        "assistant",
    )
    assert without_ids(message["content"]) == [
        {"type": "thinking", "thinking": "hm é", "signature": ""},
        {"type": "text", "text": "So: "},
        {"type": "tool_use", "name": "add", "input": {"x": 1}},
        {"type": "tool_use", "name": "add", "input": {"x": 2}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": len(server.prompt()),
        "output_tokens": len(TEXT.encode()) + 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "tool_use"),
        ({"max_tokens": 45}, "max_tokens"),
        ({"tool_choice": {"type": "none"}}, "end_turn"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_use"),
        ({"stop_sequences": ["So", "x"]}, "stop_sequence"),
    ],
)
def test_the_stream_tells_the_same(fields, reason):
    server = Messages()
    whole = server.create(tools=[ADD], **fields)
    start, *middle, delta, stop = server.create(tools=[ADD], stream=True, **fields)
    assert (start["type"], delta["type"], stop) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    assert (
        start["message"]["content"] == []
        and start["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    )
    content: list[Any] = []
    is_open = False
    for event in middle:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert not is_open and event["index"] == len(content)
            content.append({**event["content_block"], "json": ""})
        assert event["index"] == len(content) - 1
        if kind == "delta":
            assert is_open
            block = content[-1]
            part = event["delta"]
            name = {
                "text_delta": "text",
                "thinking_delta": "thinking",
                "input_json_delta": "json",
                "signature_delta": "signature",
            }
            block[name[part["type"]]] += part[
                part["type"].removesuffix("_delta").replace("input", "partial")
            ]
        is_open = kind != "stop"
    assert not is_open
    for block in content:
        text = block.pop("json")
        if block["type"] == "tool_use" and (text or reason != "max_tokens"):
            try:
                block["input"] = json.loads(text)
            except ValueError:
                block["input"] = {"INVALID_JSON": text}
    assert without_ids(content) == without_ids(whole["content"])
    assert delta["delta"] == {
        "stop_reason": whole["stop_reason"],
        "stop_sequence": whole["stop_sequence"],
    }
    assert whole["stop_reason"] == reason and delta["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("choice", "script"),
    [
        ({"type": "any"}, '[{"name": "add", "parameters": {"x": 3}}]'),
        ({"type": "tool", "name": "add"}, '{"x": 3}'),
    ],
)
def test_forced_calls_need_no_parser(choice, script):
    server = Messages(script, parsers=False)
    message = server.create(tools=[ADD], tool_choice=choice)
    (block,) = message["content"]
    assert (block["name"], block["input"], message["stop_reason"]) == ("add", {"x": 3}, "tool_use")
    assert (
        block["id"].startswith("toolu_")
        and server.engine.requests[-1][1].structured_outputs is not None
    )


def test_what_agents_send_to_shorten_the_prompt_has_no_effect():
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    assert (
        Messages("Hi").create(context_management=edits)["content"]
        == Messages("Hi").create()["content"]
    )


def test_history_becomes_messages_of_the_template():
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "1+1?", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I add", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"x": 1}},
                {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "2"}],
                },
                {"type": "tool_result", "tool_use_id": "t2", "content": "3", "is_error": False},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "Be brief."},
    ]
    assert read_messages(system, messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning": "I add",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"x": 1}},
                },
                {"id": "t2", "type": "function", "function": {"name": "add", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "tool", "tool_call_id": "t2", "content": "3"},
        {"role": "user", "content": "So?"},
    ]


def test_a_message_of_the_assistant_at_the_end_is_continued():
    server = Messages("ok")
    server.create([*HELLO, {"role": "assistant", "content": "My answer is"}], system="S")
    assert server.prompt() == "system: S\nuser: hello\nassistant: My answer is"


def test_thinking_effort_structure_and_sampling():
    seen = []

    class Spy(FakeReasoningParser):
        def __init__(self, setup):
            super().__init__(None, setup)
            seen.append(dict(setup.template_kwargs))

    server = Messages("{}", parsers=False, engine={"reasoning_parser": Spy})
    schema = {"type": "object"}
    server.create(
        thinking={"type": "disabled"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stop_sequences=["x"],
        metadata={"user_id": "u"},
        priority=2,
        chat_template_kwargs={"more": 1},
    )
    prompt, params, options = server.engine.requests[-1]
    assert (params.temperature, params.top_p, params.top_k, params.stop, options.priority) == (
        0.5,
        0.9,
        4,
        ["x"],
        2,
    )
    assert json.loads(params.structured_outputs.json) == schema and prompt.chat is not None, (
        "core finds the end of the chat's reasoning"
    )
    assert seen[-1] == {"enable_thinking": False, "reasoning_effort": "low", "more": 1}
    server.create(thinking={"type": "enabled", "budget_tokens": 1024})
    assert seen[-1] == {"enable_thinking": True}


def test_count_tokens_counts_the_prompt():
    server = Messages("ok")
    count = server.create(path="/v1/messages/count_tokens", max_tokens=..., tools=[ADD], system="S")
    assert server.engine.requests == []
    server.create(tools=[ADD], system="S")
    assert count == {"input_tokens": len(server.prompt())}


def test_keys_come_in_either_header():
    server = Messages("ok", api_key=["secret"])
    body = {"model": "fake-model", "max_tokens": 5, "messages": HELLO}
    headers = [
        {"x-api-key": "secret"},
        {"authorization": "Bearer secret"},
        {"x-api-key": "wrong"},
        {"authorization": "secret"},
        {},
    ]
    answers = [server.client.post("/v1/messages", json=body, headers=header) for header in headers]
    assert [answer.status_code for answer in answers] == [200, 200, 401, 401, 401]
    assert answers[-1].json()["error"]["type"] == "authentication_error"


def test_an_engine_that_fails():
    server = Messages("abc", engine={"fail_after": 2})
    error = server.create(status=500)
    assert error["type"] == "error" and error["error"]["type"] == "api_error"
    events = server.create(stream=True)
    assert events[-1]["type"] == "error" and "told to fail" in events[-1]["error"]["message"]
    assert server.engine.running == set()


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"model": "other"}, "not_found_error", "fake-model"),
        ({"max_tokens": ...}, "invalid_request_error", "max_tokens: Field required"),
        ({"max_tokens": 0}, "invalid_request_error", "max_tokens"),
        ({"messages": []}, "invalid_request_error", "messages"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "invalid_request_error",
            "messages.0.role",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "invalid_request_error",
            "messages.0.content.0",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
            "invalid_request_error",
            "0.input",
        ),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "invalid_request_error",
            "tools.0.type",
        ),
        ({"tools": [{"name": "f"}]}, "invalid_request_error", "tools.0.input_schema"),
        ({"tool_choice": {"type": "any"}}, "invalid_request_error", "tool_choice needs tools"),
        (
            {"tools": [ADD], "tool_choice": {"type": "tool"}},
            "invalid_request_error",
            "tool_choice.name",
        ),
        (
            {"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}},
            "invalid_request_error",
            "'sub'",
        ),
        (
            {"output_config": {"format": {"type": "xml"}}},
            "invalid_request_error",
            "output_config.format",
        ),
        ({"mcp_servers": []}, "invalid_request_error", "mcp_servers"),
        (
            {"chat_template_kwargs": {"messages": 1}},
            "invalid_request_error",
            "chat_template_kwargs",
        ),
        ({"stop_sequences": [""]}, "invalid_request_error", "stop"),
    ],
)
def test_refusals(fields, kind, words):
    server = Messages()
    error = server.create(
        fields.pop("messages", None), status=404 if kind == "not_found_error" else 400, **fields
    )
    assert (
        error["type"] == "error"
        and error["error"]["type"] == kind
        and words in error["error"]["message"]
    ), error
    assert server.engine.requests == []


def test_bodies_that_are_none():
    server = Messages()
    for body in (b"", b"{", b"[]", b"\xff"):
        response = server.client.post(
            "/v1/messages", content=body, headers={"content-type": "application/json"}
        )
        assert (
            response.status_code == 400
            and response.json()["error"]["type"] == "invalid_request_error"
        )


class TestMessages(ApiContract):
    path = "/v1/messages"
    plain: ClassVar[dict[str, Any]] = {"model": "fake-model", "max_tokens": 4000, "messages": HELLO}
    body: ClassVar[dict[str, Any]] = {
        "model": "fake-model",
        "max_tokens": 4,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "tool_use", "id": "1", "name": "add", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "1",
                        "content": [{"type": "text", "text": "2"}],
                    }
                ],
            },
        ],
        "tools": [ADD],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
    }

    def apis(self, setup: ApiSetup) -> Any:
        return apis(setup)
