"""Refused requests and their messages: always the error shape, always the name of the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pegboard.errors import EngineDeadError, Overloaded, PluginFailure

CHAT = {"messages": [{"role": "user", "content": "x"}]}


def refusal(server: Any, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    error = server.post(path, body, status)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    return error


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": "hot"}, "temperature", "expected a number, got 'hot' (a string)"),
        (
            {"temperature": -1},
            "temperature",
            "has a wrong value: expected `float` at least 0.0, got -1",
        ),
        (
            {"temperatur": 1},
            "temperatur",
            "unknown field 'temperatur'; did you mean 'temperature'?",
        ),
        ({"max_tokens": True}, "max_tokens", "expected an integer, got True (a boolean)"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"n": 0}, "n", "at least 1"),
        ({"n": 10**6}, "n", "at most 1024"),
        ({"n": 2, "temperature": 0}, "n", "greedy"),
        ({"top_k": 10**30}, "top_k", "integer"),
        ({"stop": ["a", 3]}, "stop[1]", "expected a string, got 3 (an integer)"),
        ({"stop": 3}, "stop", "expected a string or a list"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids as keys"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1", "expected a number"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "outside the vocabulary"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "at least 0"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 50}, "logprobs", "limit of 20"),
        ({"logprobs": 3}, "logprobs", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (
            {"stream": True, "stream_options": {"include_usag": True}},
            "stream_options.include_usag",
            "did you mean 'include_usage'",
        ),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        ({"cache_salt": ""}, "cache_salt", "must not be empty"),
        ({"request_id": "a b"}, "request_id", "matching"),
        ({"store": True}, "store", "expected False"),
        ({"tools": [{"type": "x"}]}, "tools[0].type", "expected 'function', got 'x'"),
        (
            {"tools": [{"type": "function", "function": {}}]},
            "tools[0].function.name",
            "expected a string, got null",
        ),
        ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
            "tool_choice",
            "no tool parser",
        ),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"guided_json": {}}, "guided_json", "send structured_outputs instead"),
        ({"use_beam_search": True, "stream": True}, "stream", "use_beam_search"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p", "no effect with use_beam_search"),
        (
            {"use_beam_search": True, "logit_bias": {"5": 1}},
            "logit_bias",
            "no effect with use_beam_search",
        ),
        ({"use_beam_search": True, "n": 11, "temperature": 0}, "n", "11 beams need 22 logprobs"),
        ({"length_penalty": 0.5}, "length_penalty", "use_beam_search: true"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "both",
        ),
        ({"messages": []}, "messages", "empty"),
        ({"messages": "hi"}, "messages", "expected a list, got 'hi'"),
        ({"messages": [3]}, "messages[0]", "expected an object, got 3"),
        (
            {"messages": [{"role": 3, "content": "x"}]},
            "messages[0].role",
            "expected a role, such as system",
        ),
        (
            {"messages": [{"role": "", "content": "x"}]},
            "messages[0].role",
            "expected a role, such as system",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        (
            {"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]},
            "messages[0].audio",
            "reads text only",
        ),
        ({"functions": [{"name": "f"}], "tool_choice": "none"}, "functions", "not both"),
        ({"functions": [{"name": 3}]}, "functions[0].name", "expected a string"),
        (
            {"functions": [{"name": "f"}], "function_call": "required"},
            "function_call",
            "none, auto or {'name': …}",
        ),
        ({"function_call": "auto"}, "function_call", "needs functions"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
            "takes text only, got an item of type image",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]",
            "takes text only, got an item of type audio",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": 3}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "expected a JSON object",
        ),
    ],
)
def test_chat_refusals_name_the_field(http, fields, param, words):
    server = http()
    error = refusal(server, "/v1/chat/completions", {**CHAT, **fields})
    assert error["param"] == param and words in error["message"], error
    assert (
        error["type"] in ("Bad Request", "BadRequestError")
        and param.split("[")[0].split(".")[0] in error["message"]
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], [-1]]}, "prompt[1][0]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "repeat_penalty": 1.1}, "repeat_penalty"),
        ({"prompt": "x", "grammar": 'root ::= "a"'}, "grammar"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "messages": []}, "messages"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "min_tokens": 20}, "min_tokens"),
    ],
)
def test_completion_refusals_name_the_field(http, fields, param):
    error = refusal(http(max_prompts_per_request=8), "/v1/completions", fields)
    assert error["param"] == param, error


def test_fields_that_ask_for_nothing_pass(http):
    http().chat(
        use_beam_search=False,
        length_penalty=1.0,
        parallel_tool_calls=True,
        reasoning_effort=None,
        tools=None,
        modalities=["text"],
        response_format={"type": "text"},
        tool_choice="none",
        structured_outputs=None,
        stop=None,
        stream_options=None,
    )
    http().complete(best_of=1, suffix="", logprobs=None)
    # by clients of llama.cpp
    sent = {"cache_prompt": True, "id_slot": -1, "timings_per_token": True, "dry_base": 1.75}
    http().complete(
        **sent, repeat_penalty=1.0, mirostat=0, reasoning_format="auto", samplers=[], n_keep=0
    )


@pytest.mark.parametrize(
    "content_type", ["text/plain", "multipart/form-data", "", "application/jsonp"]
)
def test_wrong_content_type(http, content_type):
    headers = {"Content-Type": content_type} if content_type else {}
    response = http().client.post(
        "/v1/chat/completions", content=json.dumps(CHAT).encode(), headers=headers
    )
    assert (
        response.status_code == 400 and "'application/json'" in response.json()["error"]["message"]
    )


def test_unknown_model_names_what_there_is(http):
    for path, more in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x"})):
        error = refusal(http(), path, {**more, "model": "nope"}, 404)
        assert (
            error["type"] == "NotFoundError"
            and "The model `nope` does not exist" in error["message"]
        )
        assert "fake-model" in error["message"] and error["param"] == "model"
        http().post(path, {**more, "model": "fake-model"})


def test_models(http):
    client = http(engine={"models": ["org/base", "other"]}).client
    listing = client.get("/v1/models").json()
    assert listing["object"] == "list" and [card["id"] for card in listing["data"]] == [
        "org/base",
        "other",
    ]
    card = client.get("/v1/models/org/base").json()
    assert card["object"] == "model" and card["max_model_len"] == 4096 and card["parent"] is None
    assert card["permission"][0]["object"] == "model_permission"
    missing = client.get("/v1/models/none")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "NotFoundError"


@pytest.mark.parametrize("path", ["/v1/nothing", "/", "/v1/chat/completions/more"])
def test_unknown_route_and_method(http, path):
    client = http().client
    missing = client.get(path)
    assert missing.status_code == 404 and missing.json()["error"]["code"] == 404
    wrong = client.get("/v1/completions")
    assert (
        wrong.status_code == 405
        and wrong.headers["allow"] == "POST"
        and wrong.json()["error"]["code"] == 405
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("full", retry_after_s=2.5), 503),
        (EngineDeadError("gone"), 500),
        (PluginFailure("plugin tokenizer:hf failed", plugin="tokenizer:hf"), 500),
        (ZeroDivisionError("ours"), 500),
    ],
)
def test_engine_errors_before_the_first_token_have_their_status(http, error, status, stream):
    server = http(engine={"fail_after": 0, "error": error})
    response = server.client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert response.status_code == status
    message = response.json()["error"]["message"]
    if isinstance(error, Overloaded):
        assert response.headers["retry-after"] == "3"
    assert (
        "api:openai" in message if isinstance(error, ZeroDivisionError) else str(error) in message
    )


@pytest.mark.parametrize("error", [EngineDeadError("gone"), ZeroDivisionError("ours")])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": ["x", "y"]})]
)
def test_error_inside_a_stream_is_an_event_before_done(http, path, body, error):
    server = http(engine={"fail_after": 3, "error": error})
    events = server.post(path, {**body, "stream": True})
    assert events[0]["choices"] and events[-1]["error"]["code"] == 500
    assert not server.engine.running
