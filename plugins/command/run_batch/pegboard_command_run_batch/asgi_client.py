"""Calls an ASGI application in this process, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Scope


async def post(
    app: ASGIApp, path: str, body: bytes, headers: Mapping[str, str]
) -> tuple[int, bytes]:
    """POST a JSON body. Returns (status, body of the response). Exceptions of the application are
    passed on."""
    given = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
        "client": None,
        "server": None,
    }
    is_sent = False
    status = 500
    parts: list[bytes] = []

    async def receive() -> Message:
        nonlocal is_sent
        # only code that watches for a disconnect receives again; this client does not disconnect
        if is_sent:
            await asyncio.Event().wait()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)
