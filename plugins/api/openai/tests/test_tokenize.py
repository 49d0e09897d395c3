"""/tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def test_text(http):
    server = http()
    answer = server.post("/tokenize", {"prompt": "hé"})
    assert answer == {
        "count": 4,
        "max_model_len": 4096,
        "tokens": [256, 104, 195, 169],
        "token_strs": None,
    }
    answer = server.post(
        "/tokenize",
        {
            "model": "fake-model",
            "prompt": "h",
            "add_special_tokens": False,
            "return_token_strs": True,
        },
    )
    assert answer["tokens"] == [104] and answer["token_strs"] == ["h"]
    assert server.post("/tokenize", {"prompt": ""})["tokens"] == [256]


def test_conversation_is_rendered_as_the_chat_route_renders_it(http):
    server = http()
    fields = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "he"}],
        "continue_final_message": True,
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    tokens = server.post("/tokenize", fields)["tokens"]
    server.post("/v1/chat/completions", {**fields, "max_tokens": 1})
    assert tokens == list(server.engine.requests[0][0].token_ids)
    assert bytes(tokens) == b"[tools 1]user: hi\nassistant: he"
    assert server.post("/tokenize", {**fields, "add_special_tokens": True})["tokens"] == [
        256,
        *tokens,
    ]


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.text())
def test_round_trip(http, text):
    server = http()
    tokens = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}) == {"prompt": text}


def test_special_tokens_are_shown(http):
    assert http().post("/detokenize", {"tokens": [256, 97]}) == {"prompt": "<s>a"}


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        ("/tokenize", {}, "prompt", 400),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt", 400),
        ("/tokenize", {"prompt": ["a"]}, "prompt", 400),
        ("/tokenize", {"messages": []}, "messages", 400),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", 400),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"},
            "chat_template",
            400,
        ),
        ("/tokenize", {"prompt": "a", "promt": 1}, "promt", 400),
        ("/tokenize", {"prompt": "a", "model": "nope"}, "model", 404),
        ("/detokenize", {}, "tokens", 400),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", 400),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]", 400),
        ("/detokenize", {"tokens": "a"}, "tokens", 400),
    ],
)
def test_refusals(http, path, body, param, status):
    assert http().post(path, body, status)["error"]["param"] == param


def test_tokenizer_info(http):
    info = http().client.get("/tokenizer_info").json()
    assert (
        info["tokenizer_class"] == "ByteTokenizer"
        and info["vocab_size"] == 258
        and info["model_max_length"] == 4096
    )
    assert info["bos_token"] == "<s>" and info["eos_token"] == "</s>"
    assert info["added_tokens_decoder"]["257"] == {"content": "</s>", "special": True}
