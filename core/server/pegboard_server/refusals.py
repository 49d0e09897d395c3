"""What the gateway refuses by itself, and how a body that is too large is turned away."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import Response
from starlette.types import Receive, Send

from pegboard.errors import RequestError

LINGER_S, LINGER_BYTES = 2.0, 16 * 1024 * 1024
"""How long, and how much, is still read of a body that was refused."""


class Unauthorized(RequestError):
    """No API key, or a wrong one."""

    status = 401


class BodyTooLarge(RequestError):
    """The request body is over `max_body_bytes`."""

    status = 413


class HeadTooLarge(RequestError):
    """The request has more than `h11_max_header_count` headers, or more than `h11_max_incomplete_event_size` bytes of them."""

    status = 431


async def refuse_body(response: Response, receive: Receive, send: Send) -> None:
    """Answer, then read a little more before the connection closes: a client that is still sending would otherwise be cut off
    before it reads the answer."""
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    num_bytes = 0
    with contextlib.suppress(asyncio.TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while num_bytes < LINGER_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    break
    await send({"type": "http.response.body", "body": b""})
