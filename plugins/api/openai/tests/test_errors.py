"""The statuses and types of errors are vLLM's."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.errors import EngineDeadError, Overloaded

CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", "/v1/completions", {"prompt": 5}, 400, "Bad Request"),
        ("POST", "/v1/chat/completions", {}, 400, "Bad Request"),
        ("POST", "/v1/completions", {"prompt": "x", "seed": 2**64}, 400, "Bad Request"),
        ("POST", "/v1/completions", {}, 400, "BadRequestError"),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "BadRequestError"),
        ("POST", "/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "BadRequestError"),
        ("POST", "/v1/completions", {"prompt": "x", "cache_salt": ""}, 400, "BadRequestError"),
        ("POST", "/v1/chat/completions", {"messages": []}, 400, "BadRequestError"),
        (
            "POST",
            "/v1/chat/completions",
            {**CHAT, "max_completion_tokens": 0},
            400,
            "BadRequestError",
        ),
        ("POST", "/v1/completions", {"prompt": "x", "temperature": "x"}, 400, "Bad Request"),
        ("POST", "/v1/completions", {"prompt": "x", "stream_options": {}}, 400, "BadRequestError"),
        ("POST", "/v1/chat/completions", {**CHAT, "top_logprobs": 2}, 400, "BadRequestError"),
        ("POST", "/tokenize", {"prompt": 5}, 400, "Bad Request"),
        ("POST", "/v1/completions", {"prompt": "x", "temperature": -1}, 400, "BadRequestError"),
        ("POST", "/v1/completions", {"prompt": "x", "n": 0}, 400, "BadRequestError"),
        ("POST", "/v1/completions", {"prompt": "x" * 5000}, 400, "BadRequestError"),
        ("POST", "/v1/chat/completions", {**CHAT, "chat_template": "x"}, 400, "BadRequestError"),
        ("POST", "/v1/completions", {"prompt": "x", "model": "nope"}, 404, "NotFoundError"),
        ("GET", "/v1/models/nope", None, 404, "NotFoundError"),
        ("GET", "/nowhere", None, 404, "Not Found"),
        ("GET", "/v1/completions", None, 405, "Method Not Allowed"),
    ],
)
def test_types(http, method, path, body, status, kind):
    response = http().client.request(method, path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == kind and error["code"] == status and error["message"]


def test_media_type(http):
    response = http().client.post(
        "/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}
    )
    assert response.status_code == 400 and response.json()["error"]["type"] == "Bad Request"


def test_unauthorized(http):
    response = http(api_key=["k"]).client.post("/v1/completions", json={"prompt": "x"})
    assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
    assert response.headers["www-authenticate"] == "Bearer"
    assert http(api_key=["k"]).client.post("/tokenize", json={"prompt": "x"}).status_code == 401


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("busy", retry_after_s=2.5), 503, "Service Unavailable"),
        (EngineDeadError("gone"), 500, "InternalServerError"),
        (ZeroDivisionError("a bug"), 500, "InternalServerError"),
    ],
)
def test_errors_before_the_first_token_have_their_status(http, error, status, kind, stream):
    server = http(engine={"fail_after": 0, "error": error})
    response = server.client.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert response.status_code == status and response.json()["error"]["type"] == kind
    assert response.headers.get("retry-after") == ("3" if status == 503 else None)


def test_a_request_may_not_ask_for_any_number_of_completions(http):
    server = http()
    error = server.complete(["a"] * 100, n=100, max_tokens=1, status=400)["error"]
    assert error["param"] == "n" and "4096" in error["message"]
    assert server.complete(n=1025, status=400)["error"]["param"] == "n"
    assert server.complete(["a"] * 1025, status=400)["error"]["param"] == "prompt"
    assert not server.engine.requests


def test_invocations_answer_whichever_the_body_is(http: Any) -> None:
    server = http()
    assert server.post("/invocations", {"prompt": "a"})["object"] == "text_completion"
    chat = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    assert server.post("/invocations", chat)[0]["object"] == "chat.completion.chunk"
    for body in ({}, {"prompt": "a", "messages": []}, {"input": "a"}):
        error = server.post("/invocations", body, status=400)["error"]
        assert error["type"] == "Bad Request", error
    assert (
        server.post("/invocations", {"prompt": "a", "tempreature": 1}, status=400)["error"]["param"]
        == "tempreature"
    )
