"""POST /v1/completions: shapes, many prompts, echo, logprobs, streams equal to whole answers."""

from __future__ import annotations

import pytest


def joined(events, index):
    return "".join(
        choice["text"]
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


def test_whole_answer_has_the_documented_shape(http):
    answer = http("abc").complete("hi")
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "abc",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": None,
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("echo", [False, True])
def test_every_prompt_form_whole_and_streamed(http, prompt, texts, n, echo):
    server = http(lambda prompt, index: f"{prompt}-{index}")
    expected = [(text if echo else "") + f"{text}-{index}" for text in texts for index in range(n)]
    whole = server.complete(prompt, n=n, echo=echo)
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(expected)))
    *chunks, last = server.complete(
        prompt, n=n, echo=echo, stream=True, stream_options={"include_usage": True}
    )
    assert [joined(chunks, index) for index in range(len(expected))] == expected
    assert last["choices"] == [] and last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    ids = [options.request_id for _, _, options in server.engine.requests]
    assert len(set(ids)) == len(ids) == 2 * len(texts)


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_logprobs_equal_whole(http, echo):
    server = http("wörd")
    fields = {"logprobs": 3, "echo": echo, "add_special_tokens": False}
    answer = server.complete("prömpt", **fields)["choices"][0]
    whole = answer["logprobs"]
    whole_text = answer["text"]
    events = server.complete("prömpt", stream=True, **fields)
    parts = [choice["logprobs"] for event in events for choice in event["choices"]]
    assert {
        name: [item for part in parts for item in part[name]]
        for name in whole
        if name != "text_offset"
    } == {name: value for name, value in whole.items() if name != "text_offset"}
    assert len(whole["tokens"]) == (7 if echo else 0) + 6
    assert whole["tokens"][0] == ("p" if echo else "w")
    assert whole["token_logprobs"][0] is (None if echo else whole["token_logprobs"][0])
    assert (whole["top_logprobs"][0] is None) is echo
    assert -9999.0 in whole["top_logprobs"][1].values()
    offsets = whole["text_offset"]
    tokens = whole["tokens"]
    first, second = (
        index
        for index, token in enumerate(tokens)
        if token == "\ufffd" and index < 4 + 7 * (not echo)
    )
    assert offsets[first] == offsets[second] and offsets[-1] <= len(whole_text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompt",
    [
        "ab",
        [256, 97, 256, 98],
        [97, 98, 256],
        [97, *"ö".encode(), *"日".encode(), 98],
        [97, 195, 98],
    ],
)
@pytest.mark.parametrize("max_tokens", [0, 16])
def test_text_offsets_point_into_the_text(http, prompt, max_tokens, stream):
    """Also for special tokens: those that the client sends are echoed, those that the tokenizer
    adds are not."""
    server = http("cd")
    fields = {"echo": True, "logprobs": 0, "max_tokens": max_tokens, "stream": stream}
    answers = server.complete(prompt, **fields) if stream else [server.complete(prompt, **fields)]
    choices = [choice for answer in answers for choice in answer["choices"]]
    text = "".join(choice["text"] for choice in choices)
    pairs = [
        pair
        for choice in choices
        if choice["logprobs"]
        for pair in zip(
            choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True
        )
    ]
    is_added = isinstance(prompt, str)
    for offset, token in pairs[is_added:]:
        assert (
            token == "\ufffd"
            or text[offset:].startswith(token)
            or (token, offset) == ("</s>", len(text))
        )
    assert not is_added or pairs[0][0] == 0
    if not is_added:
        assert text.startswith(server.post("/detokenize", {"tokens": prompt})["prompt"])


def test_text_offsets_go_on_across_chunks(http):
    events = http("abcd").complete("x", stream=True, logprobs=0)
    offsets = [
        offset for event in events for offset in event["choices"][0]["logprobs"]["text_offset"]
    ]
    assert offsets[:4] == [0, 1, 2, 3]


def test_echo_without_new_tokens_scores_the_prompt(http):
    server = http("never shown")
    answer = server.complete("ab", echo=True, max_tokens=0, logprobs=1, add_special_tokens=False)
    choice = answer["choices"][0]
    assert (
        choice["text"] == "ab"
        and choice["logprobs"]["tokens"] == ["a", "b"]
        and choice["finish_reason"] == "length"
    )
    assert answer["usage"]["completion_tokens"] == 0
    events = server.complete("ab", echo=True, max_tokens=0, stream=True)
    assert joined(events, 0) == "ab" and events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.complete("ab", max_tokens=0, status=400)["error"]["param"] == "max_tokens"


def test_max_tokens_default_null_and_limit(http):
    server = http()
    server.complete()
    server.complete(max_tokens=None)
    limited = http(engine={"defaults": {"max_tokens": 5}})
    limited.complete()
    assert [params.max_tokens for _, params, _ in server.engine.requests] == [16, 16]
    assert limited.engine.requests[0][1].max_tokens == 5


def test_truncated_prompt_is_echoed_as_it_was_used(http):
    answer = http("!").complete(
        "abcdef", echo=True, truncate_prompt_tokens=2, return_token_ids=True
    )
    assert answer["choices"][0]["text"] == "ef!" and answer["choices"][0]["prompt_token_ids"] == [
        101,
        102,
    ]


def test_token_ids_in_a_stream(http):
    events = http("ab").complete([[97], [98, 99]], stream=True, return_token_ids=True)
    first = {event["choices"][0]["index"]: event["choices"][0] for event in reversed(events)}
    assert first[0]["prompt_token_ids"] == [97] and first[1]["prompt_token_ids"] == [98, 99]


def test_prompt_logprobs(http):
    answer = http("x").complete("ab", prompt_logprobs=2, add_special_tokens=False)
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert (
        first is None
        and second[str(ord("b"))]["rank"] == 2
        and answer["choices"][0]["logprobs"] is None
    )


def test_stop_reason_and_hold_back(http):
    server = http("one STOP two")
    choice = server.complete(stop="STOP")["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "one ",
        "stop",
        "STOP",
    )
    events = server.complete(stop="STOP", stream=True)
    assert joined(events, 0) == "one " and events[-1]["choices"][0]["stop_reason"] == "STOP"
    assert (
        server.complete(stop="STOP", include_stop_str_in_output=True)["choices"][0]["text"]
        == "one STOP"
    )


def test_add_special_tokens(http):
    server = http()
    assert server.complete("ab")["usage"]["prompt_tokens"] == 3
    assert server.complete("ab", add_special_tokens=False)["usage"]["prompt_tokens"] == 2
