"""Between the engine's stream and the client's connection: whoever leaves first takes the other along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pegboard.errors import PegboardError
from pegboard.log import get_logger
from pegboard_api_anthropic.blocks import StreamEvent
from pegboard_api_anthropic.errors import error_body

log = get_logger(__name__)
T = TypeVar("T")

encode = msgspec.json.Encoder().encode


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientDisconnect when the client leaves before. The body must be read."""
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


class EventStream(Response):
    """Server-sent events, named. first: those there are already; rest: the others, closed at the end or when the client leaves.
    An exception becomes the event `error`."""

    def __init__(self, first: list[StreamEvent], rest: AsyncGenerator[list[StreamEvent], None]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.media_type = "text/event-stream"
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        finally:
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._send(send, self._first)
            async for news in self._rest:
                await self._send(send, news)
        except PegboardError as error:
            await self._send(send, [error_body(getattr(error, "status", 500), str(error))])
        except OSError:  # the connection broke under us; disconnect is on its way
            raise
        except Exception as error:  # a mistake of ours: the client gets an end of its stream and the log the story
            log.exception("a stream failed")
            message = f"the stream failed with {type(error).__name__}; see the log of the server"
            await self._send(send, [error_body(500, message)])
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _send(send: Send, news: list[StreamEvent]) -> None:
        if news:
            body = b"".join(f"event: {event['type']}\ndata: ".encode() + encode(event) + b"\n\n" for event in news)
            await send({"type": "http.response.body", "body": body, "more_body": True})


def json_response(body: Any) -> Response:
    return Response(encode(body), media_type="application/json")
