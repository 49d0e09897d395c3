"""Requests that are not sent to their end do not hold their connections for ever, and streams that
are cut off say so."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pegboard_server import connections
from pegboard_server.connections import TimedProtocol
from pegboard_server.streaming import EventStream

sys.path.insert(0, str(Path(__file__).parent))

from test_server_operation import SlowApi, get, run, running


async def half_sent(port: int, data: bytes) -> bytes:
    """Send the beginning of a request. Returns what comes back until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"G",
        b"POST /echo HTTP/1.1\r\nHost: x\r\n",
        b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\nGET /ec",
    ],
)
def test_half_a_head_is_closed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)

    async def body(api: SlowApi) -> None:
        async with running(api) as (port, _, _):
            answer = await half_sent(port, data)
            assert answer.count(b"HTTP/1.1 200") == data.count(b"\r\n\r\n")
            assert (await get(port, "/health"))[0] == 200
        assert not TimedProtocol.waiting

    run(body)


@pytest.mark.parametrize("part", [b"", b"{", b"x" * 500])
def test_half_a_body_is_refused(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_S", 0.2)
    head = (
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        b"900\r\n\r\n"
    )

    async def body(api: SlowApi) -> None:
        async with running(api) as (port, _, _):
            answer = await half_sent(port, head + part)
            assert answer.startswith(b"HTTP/1.1 408") and f"{len(part)} bytes".encode() in answer
            assert b"connection: close" in answer.lower()

    run(body)


def test_a_long_answer_is_not_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are for requests. An answer may take any time, and so may the next request on the
    same connection."""
    monkeypatch.setattr(connections, "HEAD_S", 0.1)
    monkeypatch.setattr(connections, "BODY_S", 0.1)

    async def body(api: SlowApi) -> None:
        async with running(api) as (port, _, _):
            waiting = asyncio.create_task(get(port, "/wait"))
            await api.entered.wait()
            await asyncio.sleep(0.4)
            api.release.set()
            assert (await waiting)[0] == 200

    run(body)


def test_the_oldest_half_request_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(api: SlowApi) -> None:
        async with running(api) as (port, _, _):
            monkeypatch.setattr(TimedProtocol, "most", 50)
            silent = [asyncio.create_task(half_sent(port, b"GET /")) for _ in range(200)]
            while sum(task.done() for task in silent) < 150:
                await asyncio.sleep(0.01)
            assert (await get(port, "/health"))[0] == 200
            for task in silent:
                task.cancel()
            await asyncio.gather(*silent, return_exceptions=True)

    run(body)


def test_a_stream_that_is_cut_off_ends_with_an_error_event() -> None:
    def encode_error(status: int, message: str, parameter: str | None) -> bytes:
        return f"data: error {status} {message}\n\n".encode()

    async def body(api: SlowApi) -> None:
        async def events() -> Any:
            yield b"data: begun\n\n"
            api.entered.set()
            await asyncio.Event().wait()

        async def stream(request: Request) -> Response:
            return EventStream(events(), None, encode_error, end=b"data: [DONE]\n\n")

        api.more.append(Route("/events", stream))
        async with running(api, shutdown_timeout_s=0.2) as (port, stop, server):
            reading = asyncio.create_task(get(port, "/events"))
            await api.entered.wait()
            stop.set()
            assert await server == 0
            told = (await reading)[2]
        assert (
            b"begun" in told
            and b"error 503 the server is stopping" in told
            and b"data: [DONE]" in told
        )

    run(body)
