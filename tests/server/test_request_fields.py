"""Fields beyond OpenAI's, on the real model. Each one changes the answer as documented."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from server_process import HTTP, Server

PROMPT = "The capital of France is"
CHAT = [{"role": "user", "content": "Name a color."}]

Complete = Callable[..., dict[str, Any]]


pytestmark = pytest.mark.usefixtures("left_idle")


def post(server: Server, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    response = HTTP.post(server.url + path, json=body)
    assert response.status_code == status, response.text
    return dict(response.json())


@pytest.fixture
def complete(server: Server) -> Complete:
    """Returns the first choice of a greedy completion, or the whole answer with `whole=True`."""

    def ask(*, whole: bool = False, status: int = 200, **fields: Any) -> dict[str, Any]:
        body = {
            "prompt": PROMPT,
            "max_tokens": 8,
            "temperature": 0,
            "return_token_ids": True,
            **fields,
        }
        answer = post(server, "/v1/completions", body, status)
        return answer if whole or status != 200 else dict(answer["choices"][0])

    return ask


@pytest.fixture
def greedy(complete: Complete) -> dict[str, Any]:
    return complete()


def test_fields_that_leave_only_the_likeliest_token(
    complete: Complete, greedy: dict[str, Any]
) -> None:
    for fields in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        assert complete(temperature=1.5, **fields)["token_ids"] == greedy["token_ids"], fields


def test_tokens_can_be_forced_allowed_and_banned(
    complete: Complete, greedy: dict[str, Any]
) -> None:
    first = greedy["token_ids"][0]
    allowed = [28, 30, 198]
    assert complete(logit_bias={"30": 100})["token_ids"] == [30] * 8
    assert first not in complete(logit_bias={str(first): -100})["token_ids"]
    assert set(complete(allowed_token_ids=allowed)["token_ids"]) <= set(allowed)
    assert "Paris" in greedy["text"] and "Paris" not in complete(bad_words=["Paris"])["text"]


def test_penalties_change_what_comes_again(complete: Complete) -> None:
    again = complete(prompt="la la la la la la", max_tokens=16)["token_ids"]
    for fields in (
        {"repetition_penalty": 1.8},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
    ):
        other = complete(prompt="la la la la la la", max_tokens=16, **fields)["token_ids"]
        assert len(set(other)) > len(set(again)), fields


def test_where_an_output_ends(server: Server, complete: Complete, greedy: dict[str, Any]) -> None:
    stopper = greedy["token_ids"][3]
    cut = complete(stop_token_ids=[stopper])
    assert cut["token_ids"] == greedy["token_ids"][: greedy["token_ids"].index(stopper) + 1]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stopper)
    late = complete(stop_token_ids=[stopper], min_tokens=6)
    assert len(late["token_ids"]) >= 6
    end = post(server, "/tokenize", {"prompt": "<|im_end|>"})["tokens"]
    ended = complete(allowed_token_ids=end)
    assert (ended["text"], ended["token_ids"], ended["finish_reason"], ended["stop_reason"]) == (
        "",
        end,
        "stop",
        None,
    )
    shown = complete(
        allowed_token_ids=end, skip_special_tokens=False, include_stop_str_in_output=True
    )
    assert shown["text"] == "<|im_end|>"
    on = complete(allowed_token_ids=end, ignore_eos=True, skip_special_tokens=False)
    assert on["finish_reason"] == "length" and on["text"] == "<|im_end|>" * 8


def test_seeds_and_n(complete: Complete) -> None:
    def texts(**fields: Any) -> list[str]:
        answer = complete(whole=True, temperature=1.2, max_tokens=12, **fields)
        return [choice["text"] for choice in answer["choices"]]

    assert texts(seed=5) == texts(seed=5)
    three = texts(seed=5, n=3)
    assert len(set(three)) == 3 and three == texts(seed=5, n=3)


def test_prompts_as_they_come_and_cut(
    server: Server, complete: Complete, greedy: dict[str, Any]
) -> None:
    ids = post(server, "/tokenize", {"prompt": PROMPT})["tokens"]
    assert greedy["prompt_token_ids"] == ids
    assert complete(prompt=ids)["token_ids"] == greedy["token_ids"]
    assert complete(truncate_prompt_tokens=3)["prompt_token_ids"] == ids[-3:]
    both = complete(whole=True, prompt=[PROMPT, "One two three"])["choices"]
    assert both[0]["token_ids"] == greedy["token_ids"] and both[1]["index"] == 1
    assert post(server, "/detokenize", {"tokens": ids}) == {"prompt": PROMPT}


def test_prompt_logprobs_are_those_of_the_same_tokens_as_output(
    complete: Complete, greedy: dict[str, Any]
) -> None:
    ids = greedy["prompt_token_ids"] + greedy["token_ids"]
    scored = complete(prompt=ids, max_tokens=1, prompt_logprobs=1)["prompt_logprobs"]
    own = complete(logprobs=1)["logprobs"]["token_logprobs"]
    assert scored[0] is None
    for token, entry, expected in zip(greedy["token_ids"], scored[-8:], own, strict=True):
        assert entry[str(token)]["logprob"] == pytest.approx(expected, abs=0.05)


def test_beams_find_at_least_what_greedy_finds(complete: Complete) -> None:
    def score(choice: dict[str, Any]) -> float:
        return float(sum(choice["logprobs"]["token_logprobs"]))

    alone = complete(logprobs=0, max_tokens=5, ignore_eos=True)
    beams = complete(
        whole=True, use_beam_search=True, n=4, logprobs=0, max_tokens=5, ignore_eos=True
    )["choices"]
    assert [len(beam["token_ids"]) for beam in beams] == [5] * 4
    assert len({tuple(beam["token_ids"]) for beam in beams}) == 4
    scores = [score(beam) for beam in beams]
    assert scores[0] >= score(alone) - 1e-3 and scores == sorted(scores, reverse=True)


def test_conversations(server: Server) -> None:
    def ids(**fields: Any) -> list[int]:
        return list(post(server, "/tokenize", {"messages": CHAT, **fields})["tokens"])

    plain = ids()
    assert (
        ids(add_generation_prompt=False) == plain[: len(ids(add_generation_prompt=False))] != plain
    )
    assert ids(add_special_tokens=True)[-len(plain) :] == plain
    opened = [*CHAT, {"role": "assistant", "content": "The color is"}]
    body = {
        "messages": opened,
        "continue_final_message": True,
        "echo": True,
        "max_tokens": 4,
        "temperature": 0,
    }
    answer = post(server, "/v1/chat/completions", {**body, "return_token_ids": True})
    assert answer["choices"][0]["message"]["content"].startswith("The color is")
    assert answer["prompt_token_ids"] == ids(messages=opened, continue_final_message=True)


def test_refusals_on_the_real_engine(complete: Complete) -> None:
    for fields, param in (
        ({"priority": 1}, "priority"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"prompt": [49152]}, "prompt"),
        ({"use_beam_search": True, "n": 11}, "n"),
        ({"truncate_prompt_tokens": 1025}, "truncate_prompt_tokens"),
    ):
        assert complete(status=400, **fields)["error"]["param"] == param


def test_cached_tokens_and_salt(start_server: Callable[..., Server]) -> None:
    server = start_server(
        "--enable-prompt-tokens-details", "--max-num-seqs", "1", "--max-num-queued-reqs", "1"
    )
    prompt = "A long enough prompt to fill several blocks of the cache. " * 8

    def cached(**fields: Any) -> int:
        usage = post(
            server,
            "/v1/completions",
            {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields},
        )["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert cached() > 32
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 32
    assert HTTP.get(server.url + "/load").json() == {"server_load": 0}
    body = {"prompt": ["x"] * 8, "max_tokens": 200, "ignore_eos": True}
    full = HTTP.post(server.url + "/v1/completions", json=body)
    assert full.status_code == 503 and full.headers["retry-after"] == "1", full.text
    assert full.json()["error"]["type"] == "Service Unavailable"
    server.wait_until_idle()
