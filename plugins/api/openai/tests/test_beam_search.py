"""use_beam_search: the best beams become choices. The script of the fake engine is deterministic,
so the best beam is the script itself, or the one that its logprobs prefer. Core's tests check the
search itself."""

from __future__ import annotations

from typing import Any

import pytest

BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 3}


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_beams_are_choices(http, path):
    server = http("abc")
    answer = getattr(server, path)("x", **BEAMS)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 6
    texts = [
        choice["text"] if path == "complete" else choice["message"]["content"]
        for choice in answer["choices"]
    ]
    assert all(len(text) == 3 for text in texts) and texts[0] != texts[1]
    assert not server.engine.running


def test_rounds_continue_the_beams_and_carry_the_salt(http):
    server = http("abc")
    server.complete([[1, 2], [3]], **{**BEAMS, "max_tokens": 2}, cache_salt="s", priority=4)
    asked = server.engine.requests
    assert len(asked) == 2 * (1 + 2)
    assert {params.logprobs for _, params, _ in asked} == {4} and {
        params.max_tokens for _, params, _ in asked
    } == {1}
    assert {prompt.cache_salt for prompt, _, _ in asked} == {"s"} and {
        options.priority for _, _, options in asked
    } == {4}
    assert len({options.request_id for _, _, options in asked}) == len(asked)
    assert sorted(len(prompt.token_ids) for prompt, _, _ in asked) == [1, 2, 2, 2, 3, 3]


def test_logprobs_of_beams(http):
    choice = http("abc").complete("x", **BEAMS, logprobs=1, return_token_ids=True)["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(choice["token_ids"]) == 3
    assert all(
        len(top) <= 2 and token in top
        for top, token in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True)
    )
    entries = http("abc").chat("x", **BEAMS, logprobs=True, top_logprobs=2)["choices"][0][
        "logprobs"
    ]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2, 2, 2]


def test_a_failing_beam_fails_the_request(http):
    server = http("abc", engine={"fail_after": 0})
    assert server.complete("x", **BEAMS, status=500)["error"]["type"] == "InternalServerError"
    assert not server.engine.running


def test_echo(http):
    choices = http("abc").complete("xyz", **BEAMS, echo=True)["choices"]
    assert all(choice["text"].startswith("xyz") and len(choice["text"]) == 6 for choice in choices)
