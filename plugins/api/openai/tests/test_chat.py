"""POST /v1/chat/completions: shapes, streams equal to whole answers, and the requests that the
engine gets."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.data.sampling_params import RequestOutputKind
from pegboard.errors import RequestError

TEXT = "Hello, wörld 🌍!"


def joined(events: list[Any], index: int = 0) -> str:
    choices = [
        choice for event in events for choice in event["choices"] if choice["index"] == index
    ]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_whole_answer_has_the_documented_shape(http):
    answer = http().chat()
    assert (
        answer["id"].startswith("chatcmpl-")
        and answer["object"] == "chat.completion"
        and answer["model"] == "fake-model"
    )
    assert set(answer) == {
        "id",
        "object",
        "created",
        "model",
        "choices",
        "service_tier",
        "system_fingerprint",
        "usage",
        "prompt_logprobs",
        "prompt_token_ids",
        "kv_transfer_params",
    }
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": TEXT,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": None,
            "reasoning_content": None,
        },
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": None,
    }
    prompt = len(b"user: hello\nassistant: ")
    output = len(TEXT.encode()) + 1
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": None,
    }


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 3}, {"max_tokens": 4}, {"stop": ["wör", "x"]}, {"max_tokens": 9, "logprobs": True}],
)
def test_stream_joined_equals_whole(http, fields):
    server = http(["one", "two wörds", TEXT])
    whole = server.chat(**fields)
    events = server.chat(stream=True, stream_options={"include_usage": True}, **fields)
    *chunks, last = events
    assert last["choices"] == [] and last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    for choice in whole["choices"]:
        index = choice["index"]
        own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in part["delta"] for part in own[1:])
        assert joined(chunks, index) == choice["message"]["content"]
        assert [part["finish_reason"] for part in own].count(None) == len(own) - 1
        assert (
            own[-1]["finish_reason"] == choice["finish_reason"]
            and own[-1]["stop_reason"] == choice["stop_reason"]
        )
        if choice["logprobs"]:
            content = [
                entry for part in own if part["logprobs"] for entry in part["logprobs"]["content"]
            ]
            assert content == choice["logprobs"]["content"]
    assert [params.output_kind for _, params, _ in server.engine.requests] == [
        RequestOutputKind.FINAL_ONLY,
        RequestOutputKind.DELTA,
    ]


def test_no_usage_in_a_stream_unless_asked_for(http):
    assert not any("usage" in event for event in http().chat(stream=True))


@pytest.mark.parametrize(
    "options",
    [{"include_usage": False, "continuous_usage_stats": True}, {"continuous_usage_stats": True}],
)
def test_no_usage_without_include_usage(http, options):
    """As in vLLM."""
    server = http()
    for events in (
        server.chat(stream=True, stream_options=options),
        server.complete(stream=True, stream_options=options),
    ):
        assert not any(event.get("usage") for event in events)


@pytest.mark.parametrize("forced", [False, True])
def test_continuous_usage_counts_up(http, forced):
    options = (
        {}
        if forced
        else {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    )
    *chunks, last = http("abc", enable_force_include_usage=forced).chat(stream=True, **options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 4]
    assert last["usage"]["completion_tokens"] == 4


def test_logprobs_have_bytes_and_the_best_alternatives(http):
    answer = http("é!").chat(logprobs=True, top_logprobs=3)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4  # two bytes, "!", end of sequence
    assert bytes(entries[0]["bytes"] + entries[1]["bytes"]).decode() == "é"
    for entry in entries:
        top = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(top) == 3 and top == sorted(top, reverse=True)
        assert top[-1] == -9999.0
        assert entry["token"] in [other["token"] for other in entry["top_logprobs"]]
    assert http().chat(logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_tokens_as_ids_and_token_ids(http):
    server = http("ab")
    answer = server.chat(logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)
    assert [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]] == [
        "token_id:97",
        "token_id:98",
        "token_id:257",
    ]
    assert answer["choices"][0]["token_ids"] == [97, 98, 257]
    assert bytes(answer["prompt_token_ids"]) == b"user: hello\nassistant: "
    events = server.chat(stream=True, return_token_ids=True)
    assert events[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [token for event in events for token in event["choices"][0].get("token_ids", [])] == [
        97,
        98,
        257,
    ]


def test_prompt_logprobs(http):
    answer = http().chat(prompt_logprobs=1)
    first, second = answer["prompt_logprobs"][:2]
    assert first is None and second[str(ord("s"))] == {
        "logprob": -0.25,
        "rank": 2,
        "decoded_token": "s",
    }


def test_cached_tokens_only_when_enabled(http):
    assert http(engine={"num_cached_tokens": 7}).chat()["usage"]["prompt_tokens_details"] is None
    server = http(engine={"num_cached_tokens": 7}, enable_prompt_tokens_details=True)
    assert server.chat()["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
    last = server.chat(stream=True, stream_options={"include_usage": True})[-1]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}


def test_echo_continues_the_last_message(http):
    server = http(" world")
    fields = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}],
        "continue_final_message": True,
        "echo": True,
    }
    answer = server.post("/v1/chat/completions", fields)
    assert answer["choices"][0]["message"]["content"] == "Hello world"
    events = server.post("/v1/chat/completions", {**fields, "stream": True})
    assert joined(events) == "Hello world" and events[1]["choices"][0]["delta"] == {
        "content": "Hello"
    }
    assert bytes(server.engine.requests[0][0].token_ids) == b"user: hi\nassistant: Hello"


def test_response_role_and_generation_prompt(http):
    server = http(response_role="bot")
    assert server.chat()["choices"][0]["message"]["role"] == "bot"
    assert server.chat(add_generation_prompt=False)["choices"][0]["message"]["role"] == "user"
    assert bytes(server.engine.requests[1][0].token_ids) == b"user: hello\n"


def test_text_parts_are_joined_and_history_round_trips(http):
    server = http()
    answer = server.chat([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert bytes(server.engine.requests[0][0].token_ids) == b"user: a\nb\nassistant: "
    history = [
        {"role": "user", "content": "a"},
        answer["choices"][0]["message"],
        {"role": "developer", "content": "c"},
    ]
    server.post("/v1/chat/completions", {"messages": history})


def test_tool_calls_in_the_history_and_tools_reach_the_template(http):
    server = http()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    seen = []
    tokenizer = server.engine.tokenizer()
    render = tokenizer.render
    tokenizer.render = lambda chat: seen.append(chat) or render(chat)
    server.post(
        "/v1/chat/completions", {"messages": history, "tools": tools, "tool_choice": "none"}
    )
    assert seen[0].messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert seen[0].tools == tools


def test_every_sampling_field_reaches_the_engine(http):
    server = http()
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "n": 2,
        "seed": 3,
        "stop": ["zz"],
        "stop_token_ids": [9],
        "min_tokens": 1,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "truncate_prompt_tokens": 50,
        "allowed_token_ids": [1, 2],
        "bad_words": ["q"],
        "prompt_logprobs": 2,
    }
    server.chat(
        **fields,
        logit_bias={"5": 200, "6": -3},
        max_completion_tokens=11,
        max_tokens=99,
        logprobs=True,
        top_logprobs=4,
        spaces_between_special_tokens=False,
        vllm_xargs={"a": 1, "b": ["x", 2.5]},
        priority=-2,
        cache_salt="salt",
        user="u",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
    )
    prompt, params, options = server.engine.requests[0]
    assert {name: getattr(params, name) for name in fields} == fields
    assert (
        params.logit_bias == {5: 100.0, 6: -3.0}
        and params.max_tokens == 11
        and params.logprobs == 4
    )
    assert options.priority == -2 and prompt.cache_salt == "salt"
    assert (
        params.extra_args == {"a": 1, "b": ["x", 2.5]}
        and params.spaces_between_special_tokens is False
    )


@pytest.mark.parametrize(
    ("server_says", "request_says", "as_ids"),
    [(True, None, True), (True, False, False), (False, True, True)],
)
def test_the_server_may_name_tokens_by_id(http, server_says, request_says, as_ids):
    server = http("ab", return_tokens_as_token_ids=server_says)
    fields = {} if request_says is None else {"return_tokens_as_token_ids": request_says}
    chat = server.chat(logprobs=True, **fields)["choices"][0]["logprobs"]["content"][0]["token"]
    text = server.complete(logprobs=1, **fields)["choices"][0]["logprobs"]["tokens"][0]
    assert (chat == "token_id:97") == as_ids and (text == "token_id:97") == as_ids


def test_extra_arguments_are_called_what_the_client_calls_them(http):
    """The engine's error about extra_args names the field of the request."""
    error = RequestError("no logits processor reads 'x'", parameter="extra_args")
    server = http(engine={"fail_after": 0, "error": error})
    for stream in (False, True):
        for ask in (server.chat, server.complete):
            body = ask(status=400, stream=stream, vllm_xargs={"x": {"any": ["JSON", None, True]}})
            assert body["error"]["param"] == "vllm_xargs"
    assert server.engine.requests[0][1].extra_args == {"x": {"any": ["JSON", None, True]}}


def test_defaults_request_over_model_over_neutral(http):
    server = http(engine={"defaults": {"temperature": 0.25, "top_k": 5, "max_tokens": 6}})
    server.chat(top_k=9)
    server.chat(max_tokens=100, temperature=None)
    server.chat(max_tokens=2)
    first, second, third = (params for _, params, _ in server.engine.requests)
    assert (first.temperature, first.top_k, first.top_p, first.max_tokens) == (0.25, 9, 1.0, 6)
    assert (second.temperature, second.max_tokens, third.max_tokens) == (0.25, 6, 2)
    plain = http()
    plain.chat()
    params = plain.engine.requests[0][1]
    assert params.max_tokens is None and params.temperature == 1.0


def test_request_ids(http):
    server = http()
    assert server.chat(request_id="mine")["id"] == "chatcmpl-mine"
    body = {"messages": [{"role": "user", "content": "x"}], "request_id": "body"}
    response = server.client.post(
        "/v1/chat/completions", json=body, headers={"X-Request-Id": "header"}
    )
    assert response.json()["id"] == "chatcmpl-header"
    assert {options.response_id for _, _, options in server.engine.requests} == {
        "chatcmpl-mine",
        "chatcmpl-header",
    }
    ids = [options.request_id for _, _, options in server.engine.requests]
    assert (
        ids[0].startswith("chatcmpl-mine-")
        and ids[0] != server.chat(request_id="mine")
        and len(set(ids)) == 2
    )


def test_chat_template_needs_trust(http):
    error = http().chat(chat_template="{{x}}", status=400)["error"]
    assert error["param"] == "chat_template"
    server = http(trust_request_chat_template=True)
    server.chat(chat_template="T")
    assert bytes(server.engine.requests[0][0].token_ids).startswith(b"Tuser")
    assert (
        server.chat(chat_template_kwargs={"chat_template": "x"}, status=400)["error"]["param"]
        == "chat_template_kwargs"
    )


def test_options_of_the_processor_need_trust(http):
    options = {"mm_processor_kwargs": {"size": 3}}
    assert http().chat(**options, status=400)["error"]["param"] == "mm_processor_kwargs"
    server = http(trust_request_mm_kwargs=True)
    server.chat(**options)
    assert server.engine.requests[0][0].media_options == {"size": 3}


def test_template_error_is_the_request_s(http):
    error = http().chat(chat_template_kwargs={"fail": True}, status=400)["error"]
    assert (
        "template" in error["message"]
        and error["type"] == "BadRequestError"
        and error["code"] == 400
    )


def test_cached_tokens_of_several_prompts_are_added(http):
    """Once for each prompt, however many answers it has."""
    server = http(engine={"num_cached_tokens": 7}, enable_prompt_tokens_details=True)
    usage = server.complete(["a b", "c", "d"], n=2, max_tokens=2)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 21}
