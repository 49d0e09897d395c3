"""Connects the engine's streams with the client's connection: when one ends early, the other ends too.

A client that disconnects cancels the work for it. Cancelled work closes the engine's stream, and closing it aborts the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pegboard.errors import PegboardError
from pegboard.log import get_logger

log = get_logger(__name__)
T = TypeVar("T")

EncodeError = Callable[[int, str, str | None], bytes]
"""Status, message and field at fault → the event that tells the client."""

_encode = msgspec.json.Encoder().encode


class Closes(Protocol):
    """Something that runs until it is closed; closing it again is fine."""

    async def aclose(self) -> None: ...


@asynccontextmanager
async def closed_on_error(running: Closes) -> AsyncIterator[None]:
    """Close `running` when the block ends early, for any reason."""
    try:
        yield
    except BaseException:
        await running.aclose()
        raise


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Cancels it and raises ClientDisconnect when the client leaves before. The body must be read."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        left.cancel()
        task.cancel()
        await asyncio.gather(left, task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_of(items: AsyncGenerator[T, None]) -> T:
    """The first item. A response that waits for it before it starts gives an error its proper status."""
    async for item in items:
        return item
    raise PegboardError("the engine ended the request without an output")


async def chain(first: T, rest: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """`first`, then `rest`; whoever made `rest` closes it."""
    yield first
    async for item in rest:
        yield item


async def exhaust(items: AsyncGenerator[Any, None]) -> None:
    """Read to the end."""
    async with aclosing(items):
        async for _ in items:
            pass


def named_event(event: Mapping[str, Any]) -> bytes:
    """A server-sent event that is called as its `type`."""
    return f"event: {event['type']}\ndata: ".encode() + _encode(event) + b"\n\n"


class EventStream(Response):
    """Server-sent events. An exception in `events` becomes an error event, written by `encode_error`.

    outputs: what `events` reads. Both are closed at the end or when the client leaves, `outputs` by itself because closing a
    generator that was never started runs none of its code; None = they go on when the client leaves. end: the last bytes.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], outputs: Closes | None, encode_error: EncodeError, *, end: bytes = b""
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.media_type = "text/event-stream"
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._events = events
        self._outputs = outputs
        self._encode_error = encode_error
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        finally:
            await self._events.aclose()
            if self._outputs is not None:
                await self._outputs.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except PegboardError as error:
            await self._send_error(send, error, str(error))
        except OSError:  # the connection broke; the disconnect message is on its way
            raise
        except Exception as error:  # our own mistake: the client gets an end of its stream, and the log gets the traceback
            log.exception("a stream failed")
            await self._send_error(send, error, f"the stream failed with {type(error).__name__}; see the log of the server")
        await send({"type": "http.response.body", "body": self._end, "more_body": False})

    async def _send_error(self, send: Send, error: Exception, message: str) -> None:
        event = self._encode_error(getattr(error, "status", 500), message, getattr(error, "parameter", None))
        await send({"type": "http.response.body", "body": event, "more_body": True})
