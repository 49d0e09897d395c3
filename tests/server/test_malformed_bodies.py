"""A thousand bodies that are wrong in some way. Each is refused with an error object, or it is
valid after all and answered. None has a lasting effect."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "hostile"))

import httpx
import pytest
from hostile_bodies import FIELDS, VALUES, encoded, mutate_value
from server_process import MODEL, Server

NUM_BODIES = 1000
NUM_AT_ONCE = 16

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call-1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"at": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": "nothing"},
    ],
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "stop": ["x", "y"],
    "logit_bias": {"17": 1.5},
    "logprobs": True,
    "top_logprobs": 2,
    "seed": 3,
    "stream": False,
    "metadata": {"a": "b"},
    "tools": [
        {
            "type": "function",
            "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
        }
    ],
}
COMPLETION: dict[str, Any] = {
    "model": MODEL,
    "prompt": ["One", "Two"],
    "max_tokens": 2,
    "temperature": 0,
    "n": 1,
    "logprobs": 1,
    "echo": True,
    "stop_token_ids": [5, 6],
    "bad_words": ["three"],
    "min_tokens": 1,
    "frequency_penalty": 0.5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "top_k": 4,
    "min_p": 0.1,
    "request_id": "r-1",
    "ignore_eos": True,
}
VALID = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}


def make_body(seed: int) -> tuple[str, bytes]:
    """Returns the path and the body of number `seed`."""
    chance = random.Random(seed)
    path = chance.choice(list(VALID))
    body = copy.deepcopy(VALID[path])
    for _ in range(chance.randint(1, 3)):
        if chance.random() < 0.25:
            body[chance.choice(FIELDS)] = copy.deepcopy(chance.choice(VALUES))
        else:
            mutate_value(chance, body)
    if not isinstance(body.get("max_tokens"), int):  # a missing limit is valid and long
        body["max_tokens"] = chance.choice([2, "2", [2], 2.5, 2**40])
    elif body["max_tokens"] > 2 and body["max_tokens"] < 2**31:
        body["max_tokens"] = 2
    return path, encoded(chance, body)


def check_answer(response: httpx.Response, path: str, body: bytes) -> int:
    """Returns the status, after checking that a client can read the answer."""
    told = f"{path} {body[:600]!r} → {response.status_code} {response.text[:600]}"
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
            assert events[-1] == "[DONE]", told
            assert all("error" not in json.loads(event) for event in events[:-1]), told
        else:
            assert response.json()["choices"], told
        return 200
    assert 400 <= response.status_code < 500, told
    error = response.json()["error"]
    assert (
        set(error) == {"message", "type", "param", "code"} and error["code"] == response.status_code
    ), told
    assert isinstance(error["message"], str) and 0 < len(error["message"]) < 2000, told
    return response.status_code


def test_valid_bodies_are_valid(server: Server) -> None:
    for path, body in VALID.items():
        assert check_answer(httpx.post(server.url + path, json=body, timeout=60), path, b"") == 200


def test_a_thousand_malformed_bodies(server: Server) -> None:
    headers = {"Content-Type": "application/json"}
    limits = httpx.Limits(max_connections=NUM_AT_ONCE)
    wrong: list[str] = []
    statuses: Counter[int] = Counter()

    async def post(http: httpx.AsyncClient, seed: int) -> None:
        path, body = make_body(seed)
        response = await http.post(path, content=body, headers=headers)
        try:
            statuses[check_answer(response, path, body)] += 1
        except (AssertionError, ValueError, KeyError) as error:
            wrong.append(f"body {seed}: {error!r}")

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as http:
            await asyncio.gather(*(post(http, seed) for seed in range(NUM_BODIES)))

    asyncio.run(main())
    assert not wrong, f"{len(wrong)} bodies were answered wrongly:\n" + "\n".join(wrong[:5])
    # both valid and invalid bodies were tried
    assert statuses[400] > NUM_BODIES // 2 and statuses[200] > 10, statuses
    server.wait_until_idle()
    assert server.status("/health") == 200
    with server.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4
        )
        assert "Paris" in answer.choices[0].text


def test_wrong_media_types_are_refused(server: Server) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = httpx.post(
            server.url + "/v1/completions",
            content=json.dumps(COMPLETION),
            headers={"Content-Type": content_type},
            timeout=60,
        )
        assert check_answer(response, "/v1/completions", content_type.encode()) == 400


def test_body_over_the_limit_is_refused_unread(server: Server) -> None:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
        "application/json\r\nContent-Length: 999999999999\r\n\r\n"
    )
    assert answer_to(server, head.encode()).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 1_000_000,
        b"GET /health\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: "
            b"3\r\n\r\n{}"
        ),
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}",
    ],
    ids=[
        "tls",
        "http2",
        "no http",
        "long header",
        "zero byte",
        "negative length",
        "two lengths",
        "bad chunk",
    ],
)
def test_what_is_no_http(server: Server, data: bytes) -> None:
    """The request is refused, or the connection is closed. The next client gets its answer."""
    answer = answer_to(server, data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer
    assert server.status("/health") == 200


def answer_to(server: Server, data: bytes) -> bytes:
    """Returns everything that arrives until the answer is complete or the server closes the
    connection."""
    received = b""
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(data)
        while b"\r\n\r\n" not in received and (more := connection.recv(65536)):
            received += more
    return received
