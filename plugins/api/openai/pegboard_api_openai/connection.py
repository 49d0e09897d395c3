"""Between the engine's streams and the client's connection: whoever leaves first takes the other along.

A client that disconnects cancels the work for it; cancelled work closes the engine's stream, and closing it aborts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pegboard.data.output import RequestOutput
from pegboard.errors import PegboardError
from pegboard.log import get_logger
from pegboard_api_openai.errors import BAD_REQUEST, InvalidBody, error_body

log = get_logger(__name__)
T = TypeVar("T")

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""Outputs of several prompts of one HTTP request, each with the index of its prompt."""

DONE = b"data: [DONE]\n\n"


class Closes(Protocol):
    """Something that runs until it is closed; again is fine."""

    async def aclose(self) -> None: ...


@asynccontextmanager
async def closed_on_error(running: Closes) -> AsyncIterator[None]:
    """Whatever ends the block early closes `running` too."""
    try:
        yield
    except BaseException:
        await running.aclose()
        raise


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


async def merge(streams: Sequence[AsyncIterator[RequestOutput]]) -> Outputs:
    """All streams as they come. The first exception ends all; closing the result closes every stream."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:  # type: ignore[type-var]
            async for output in only:
                yield 0, output
        return
    news: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_pump(index, stream, news)) for index, stream in enumerate(streams)]
    num_running = len(tasks)
    try:
        while num_running:
            index, item = await news.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, stream: AsyncIterator[RequestOutput], news: "asyncio.Queue[Any]") -> None:
    try:
        async with aclosing(stream) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                await news.put((index, output))
        await news.put((index, None))
    except Exception as error:  # noqa: BLE001  carried to the consumer, who raises it
        await news.put((index, error))


async def last_outputs(outputs: Outputs, num_prompts: int) -> list[RequestOutput]:
    """The final output of every prompt."""
    found: dict[int, RequestOutput] = {}
    async with aclosing(outputs):
        async for index, output in outputs:
            found[index] = output
    if len(found) < num_prompts:
        raise PegboardError(f"the engine answered {len(found)} of {num_prompts} prompts")
    for output in found.values():
        refuse_failed(output)
    return [found[index] for index in range(num_prompts)]


def refuse_failed(output: RequestOutput) -> None:
    """The engine gave a completion up: that is an error for the client, not an answer."""
    if any(completion.finish_reason == "error" for completion in output.outputs):
        raise PegboardError(f"request {output.request_id} failed in the engine; the log of the server says why")


async def first_output(outputs: Outputs) -> tuple[int, RequestOutput]:
    """Waiting for it before the response starts gives an error its proper status."""
    async for item in outputs:
        return item
    raise PegboardError("the engine ended the request without an output")


async def chain(first: tuple[int, RequestOutput], rest: Outputs) -> Outputs:
    """`first`, then `rest`; whoever made `rest` closes it."""
    yield first
    async for item in rest:
        yield item


class EventStream(Response):
    """Server-sent events. An exception in `events` becomes an error event; the last event is always [DONE].

    outputs: what `events` reads. Both are closed at the end or when the client leaves, `outputs` by itself because closing a
    generator that was never started runs none of its code; None = they go on when the client leaves. end: the last event, for
    APIs that have none.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], outputs: Closes | None, *, end: bytes = DONE) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.media_type = "text/event-stream"
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._events = events
        self._outputs = outputs
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
        except OSError:  # the connection broke under us; disconnect is on its way
            raise
        except Exception as error:  # a mistake of ours: the client gets an end of its stream and the log the story
            log.exception("a stream failed")
            await self._send_error(send, error, f"the stream failed with {type(error).__name__}; see the log of the server")
        await send({"type": "http.response.body", "body": self._end, "more_body": False})

    async def _send_error(self, send: Send, error: Exception, message: str) -> None:
        body = error_body(getattr(error, "status", 500), message, getattr(error, "parameter", None))
        event = b"data: " + msgspec.json.encode(body) + b"\n\n"
        await send({"type": "http.response.body", "body": event, "more_body": True})


def endpoint(answer: Callable[[Request], Awaitable[Response]], body_model: type[BaseModel] | None = None) -> Any:
    """`answer` as a route's endpoint: a body that does not fit gets vLLM's type of error. body_model: what the body must be,
    for /openapi.json."""

    async def call(http: Request) -> Response:
        try:
            return await answer(http)
        except InvalidBody as error:
            return json_response(error_body(error.status, str(error), error.parameter, BAD_REQUEST), error.status)

    call.__doc__ = answer.__doc__
    call.body_model = body_model  # type: ignore[attr-defined]
    return call


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
