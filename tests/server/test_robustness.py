"""Extreme clients of a server: thousands of connections, readers that do not read, bodies that are
too large."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from typing import Any

import httpx
from server_process import MODEL, Server, wait_until

NUM_CONNECTIONS = 2000
NUM_AT_ONCE = 200

BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "The capital of France is",
    "temperature": 0,
    "max_tokens": 4,
}


def answer_of(server: Server) -> str:
    return str(
        httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
        .raise_for_status()
        .json()["choices"][0]["text"]
    )


def num_sockets(server: Server) -> int:
    """Returns the file descriptors that the server has open."""
    from pathlib import Path

    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def test_two_thousand_connections_opened_and_dropped(server: Server) -> None:
    """Some clients send nothing, some send half a request, some send a whole one; some close, some
    reset. Nothing remains of them."""
    before = num_sockets(server)
    whole = json.dumps({**BODY, "stream": True, "max_tokens": 900, "ignore_eos": True}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
        b"application/json\r\nContent-Length: %d\r\n\r\n"
    ) % len(whole)
    sent = [
        b"",
        b"GET /hea",
        head,
        head + whole[:20],
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        head + whole,
    ]

    async def one(number: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        # every 40th client asks for tokens; the others disconnect before
        writer.write(sent[5] if number % 40 == 0 else sent[number % 5])
        await writer.drain()
        if number % 2:
            writer.transport.abort()
        else:
            writer.close()

    async def main() -> None:
        for start in range(0, NUM_CONNECTIONS, NUM_AT_ONCE):
            await asyncio.gather(*(one(number) for number in range(start, start + NUM_AT_ONCE)))

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft > NUM_AT_ONCE + 50, f"the limit of open files is {soft} ({hard})"
    asyncio.run(main())
    server.wait_until_idle()
    wait_until(lambda: num_sockets(server) <= before + 5, "the server has closed the connections")
    assert "Paris" in answer_of(server)


def test_slow_readers_do_not_stall_others(server: Server) -> None:
    """Eight clients request long streams and read nothing. Another client still gets correct
    answers."""
    alone = answer_of(server)
    long = {
        **BODY,
        "stream": True,
        "max_tokens": 300,
        "ignore_eos": True,
        "n": 2,
        "temperature": 1,
        "logprobs": 5,
    }
    payload = json.dumps(long).encode()
    clients = []
    for _ in range(8):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", server.port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        clients.append(client)
    wait_until(
        lambda: server.stats()["num_requests_running"] >= 8, "the slow readers' requests run"
    )
    assert [answer_of(server) for _ in range(3)] == [alone] * 3
    assert server.status("/health") == 200
    for client in clients:
        client.close()
    server.wait_until_idle()


def test_ten_megabytes_are_refused_early(server: Server) -> None:
    """A body with a length is refused before it is sent. A body without one is refused as soon as
    it exceeds the limit of 8 MiB."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(head + b"Content-Length: 10000000\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 413")
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            while sent < 100_000_000:
                client.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
                sent += 65536
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert sent < 50_000_000, "the server went on reading"
    answer = httpx.post(
        f"{server.url}/v1/completions",
        content=b" " * 10_000_000,
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    assert answer.status_code == 413 and "max_body_bytes" in answer.json()["error"]["message"]
    assert server.status("/health") == 200
