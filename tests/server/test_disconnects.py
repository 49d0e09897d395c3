"""Clients that disconnect: the engine drops their requests, gives the blocks back, and continues to
serve other clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from server_process import MODEL, Server, wait_until

ENDLESS: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Once upon a time",
    "max_tokens": 900,
    "ignore_eos": True,
}


@pytest.fixture(autouse=True)
def still_answers(server: Server) -> Iterator[None]:
    """After every test no request runs, no block is held, and the next request gets its answer."""
    yield
    server.wait_until_idle()
    with server.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4
        )
    assert "Paris" in answer.choices[0].text


def request_bytes(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


def connect(server: Server, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(data)
    return connection


def close(connection: socket.socket) -> None:
    """Close the connection in an orderly way, with FIN."""
    connection.close()


def reset(connection: socket.socket) -> None:
    """Close the connection abruptly, with RST, like a client that crashed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def running(server: Server) -> int:
    return int(server.stats()["num_requests_running"])


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize(
    "more", [{}, {"n": 3}, {"prompt": ["a b c", "d e f"]}], ids=["one", "n", "prompts"]
)
def test_leaving_mid_stream(
    server: Server, leave: Callable[[socket.socket], None], more: dict[str, Any]
) -> None:
    connection = connect(server, request_bytes({**ENDLESS, "stream": True, **more}))
    received = b""
    while b"data: " not in received:
        received += connection.recv(4096)
    assert received.startswith(b"HTTP/1.1 200") and running(server) > 0
    leave(connection)


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stream": True}], ids=["one", "n", "stream"])
def test_leaving_while_waiting(
    server: Server, leave: Callable[[socket.socket], None], more: dict[str, Any]
) -> None:
    """The clients disconnect before the answer begins: it is not streamed, or the first token of
    the stream is still to come."""
    connection = connect(server, request_bytes({**ENDLESS, **more}))
    wait_until(lambda: running(server) > 0, "the request runs")
    leave(connection)


def test_leaving_from_the_queue(server: Server) -> None:
    """More requests are sent than may run at once, so that some have never been scheduled when
    their clients disconnect."""
    with contextlib.ExitStack() as connections:
        for number in range(80):
            body = {**ENDLESS, "prompt": f"Story {number}:", "stream": bool(number % 2)}
            connections.callback(connect(server, request_bytes(body)).close)
        wait_until(
            lambda: server.stats()["num_requests_waiting"] > 0 < running(server),
            "some run and some wait",
        )


@pytest.mark.parametrize(
    "keep", [10, 60, -30, -1], ids=["request line", "headers", "body", "last byte"]
)
def test_leaving_before_the_request_is_complete(server: Server, keep: int) -> None:
    connect(server, request_bytes(ENDLESS)[:keep]).close()
    reset(connect(server, request_bytes(ENDLESS)[:keep]))


def test_leaving_right_after_the_request(server: Server) -> None:
    """The clients disconnect at any stage of the server's work: reading, tokenizing, adding."""
    for _ in range(20):
        connect(server, request_bytes({**ENDLESS, "stream": True})).close()
        reset(connect(server, request_bytes(ENDLESS)))


def test_others_are_not_disturbed(server: Server) -> None:
    with server.client() as client:
        fields: dict[str, Any] = {
            "model": MODEL,
            "prompt": "A paged KV cache is",
            "temperature": 0,
            "max_tokens": 24,
        }
        alone = client.completions.create(**fields).choices[0].text

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            request = http.stream(
                "POST", f"{server.url}/v1/completions", json={**ENDLESS, "stream": True}
            )
            async with request as response:
                async for _ in response.aiter_lines():
                    return

    async def give_up(http: openai.AsyncOpenAI) -> None:
        body = {name: value for name, value in ENDLESS.items() if name != "ignore_eos"}
        task = asyncio.ensure_future(
            http.completions.create(**body, extra_body={"ignore_eos": True})
        )
        await asyncio.to_thread(wait_until, lambda: running(server), "a request runs")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def main() -> list[str]:
        async with server.async_client() as http:
            stay = [asyncio.ensure_future(http.completions.create(**fields)) for _ in range(4)]
            await asyncio.gather(*(leave() for _ in range(4)), *(give_up(http) for _ in range(4)))
            return [(await task).choices[0].text for task in stay]

    assert asyncio.run(main()) == [alone] * 4
