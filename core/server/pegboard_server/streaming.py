"""Connects the engine's streams with the client's connection: when one of them ends early, the
other ends too.

When a client disconnects, the work for it is cancelled. Cancelled work closes the engine's stream,
and closing the stream aborts the request.
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

from pegboard.errors import PegboardError, RequestError
from pegboard.log import get_logger
from pegboard_server.logs import ERROR

log = get_logger(__name__)
T = TypeVar("T")


class Stopping(RequestError):
    """The server is stopping: it takes no new requests, or it stops before it has a whole answer
    (HTTP 503)."""

    status = 503


EncodeError = Callable[[int, str, str | None], bytes]
"""Builds the error event for the client from the status, the message and the name of the wrong
field."""

_encode = msgspec.json.Encoder().encode


class Closes(Protocol):
    """Anything that can be closed, more than once."""

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
    """Returns the result of `work`. When the client disconnects first, cancels `work` and raises
    ClientDisconnect. The body must have been read."""
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
    """Returns the first item. A response that waits for it before it starts can give an error its
    proper status."""
    async for item in items:
        return item
    raise PegboardError("the engine ended the request without an output")


async def chain(first: T, rest: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yields `first`, then all of `rest`. The caller closes `rest`."""
    yield first
    async for item in rest:
        yield item


async def exhaust(items: AsyncGenerator[Any, None]) -> None:
    """Read `items` to the end and drop them."""
    async with aclosing(items):
        async for _ in items:
            pass


def named_event(event: Mapping[str, Any], encode: Callable[[Any], bytes] = _encode) -> bytes:
    """A server-sent event whose name is its `type`."""
    return f"event: {event['type']}\ndata: ".encode() + encode(event) + b"\n\n"


class EventStream(Response):
    """Server-sent events. An exception in `events` becomes an error event, written by
    `encode_error`.

    outputs is the stream that `events` reads. Both are closed at the end, or when the client
    disconnects. `outputs` is closed separately, because closing a generator that was never started
    does not run its code. None: nothing ends early when the client disconnects. end: the last bytes
    of the response.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        outputs: Closes | None,
        encode_error: EncodeError,
        *,
        end: bytes = b"",
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
            await while_connected(receive, self._send_all(send, scope.setdefault("state", {})))
        except asyncio.CancelledError:  # only the server cancels, when it stops
            await self._send_error(
                send, Stopping("the server is stopping, so the answer is not complete")
            )
            await send({"type": "http.response.body", "body": self._end, "more_body": False})
            raise
        finally:
            await self._events.aclose()
            if self._outputs is not None:
                await self._outputs.aclose()

    async def _send_all(self, send: Send, state: dict[str, Any]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except PegboardError as error:
            state[ERROR] = error
            await self._send_error(send, error)
        except OSError:  # the connection broke; the disconnect message is on its way
            raise
        except Exception as error:  # a bug: end the client's stream and log the traceback
            log.exception("a stream failed")
            await self._send_error(
                send,
                error,
                f"the stream failed with {type(error).__name__}; see the log of the server",
            )
        await send({"type": "http.response.body", "body": self._end, "more_body": False})

    async def _send_error(self, send: Send, error: Exception, message: str = "") -> None:
        event = self._encode_error(
            getattr(error, "status", 500), message or str(error), getattr(error, "parameter", None)
        )
        await send({"type": "http.response.body", "body": event, "more_body": True})
