"""POST /inference/v1/generate: the tokens of /v1/completions, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

PATH = "/inference/v1/generate"


def test_token_ids_in_and_out(http: Any) -> None:
    server = http("hello")
    body = {
        "token_ids": [104, 105],
        "sampling_params": {"n": 2, "logprobs": 1, "seed": 1},
        "request_id": "mine",
    }
    answer = server.post(PATH, body)
    assert answer["request_id"] == "generate-tokens-mine" and answer["prompt_logprobs"] is None
    first, second = answer["choices"]
    expected = server.complete([104, 105], return_token_ids=True)["choices"][0]
    assert first["token_ids"] == second["token_ids"] == expected["token_ids"]
    assert (first["index"], second["index"], first["finish_reason"]) == (
        0,
        1,
        expected["finish_reason"],
    )
    assert [entry["token"] for entry in first["logprobs"]["content"]] == [
        f"token_id:{token}" for token in first["token_ids"]
    ]
    asked = server.engine.requests[0][1]
    assert asked.max_tokens == 16 and asked.n == 2


def test_every_other_field_reaches_the_engine(http: Any) -> None:
    server = http("hello")
    more = {"priority": 3, "cache_salt": "s", "kv_transfer_params": {"do_remote_decode": True}}
    sampling = {
        "max_tokens": 2,
        "prompt_logprobs": 0,
        "seed": 4,
        "stop_token_ids": [1],
        "structured_outputs": {"regex": "h.*"},
    }
    answer = server.post(PATH, {"token_ids": [104, 105], "sampling_params": sampling, **more})
    prompt, params, options = server.engine.requests[0]
    assert (prompt.cache_salt, options.priority, params.seed, params.stop_token_ids) == (
        "s",
        3,
        4,
        [1],
    )
    assert (
        params.extra_args == {"kv_transfer_params": {"do_remote_decode": True}}
        and params.structured_outputs.regex == "h.*"
    )
    assert len(answer["choices"][0]["token_ids"]) == 2 and len(answer["prompt_logprobs"]) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": None}, "token_ids is required"),
        ({"token_ids": ["a"]}, "token_ids[0]: expected an integer"),
        ({"token_ids": []}, "0 tokens"),
        ({"sampling_params": None}, "sampling_params is required"),
        ({"sampling_params": {"temperatur": 1}}, "'sampling_params.temperatur'"),
        ({"sampling_params": {"stream": True}}, "'sampling_params.stream'"),
        ({"sampling_params": {"temperature": -1.0}}, "temperature"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"stream": True}, "/v1/completions streams"),
        ({"features": []}, "unknown field 'features'"),
        ({"cache_salt": ""}, "cache_salt must not be empty"),
    ],
)
def test_wrong_bodies_are_refused(http: Any, change: dict[str, Any], words: str) -> None:
    body = {"token_ids": [104], "sampling_params": {}, **change}
    assert words in http().post(PATH, body, 400)["error"]["message"]
