"""The running requests of an API process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping

from pegboard.data.output import RequestOutput
from pegboard.data.request import RequestDelta
from pegboard.engine.boundary.messages import Failure
from pegboard.errors import EngineDeadError, PegboardError, RequestError, blamed
from pegboard.front.output_stream import OutputStream
from pegboard.log import get_logger

log = get_logger(__name__)

MANY_BYTES = 16 * 1024
"""Longer encoded logprobs of a prompt are converted in a thread: one position with 20 of them has
0.3 KiB and takes 60 µs."""


class RequestStream:
    """One request: its stream, and the event that wakes its consumer. response_id: see
    `RequestOptions`. is_lost: the engine no longer has the request, or never accepted it."""

    def __init__(self, stream: OutputStream, response_id: str | None) -> None:
        self.stream = stream
        self.response_id = response_id
        self.wake = asyncio.Event()
        self.is_lost = False

    def fail(self, error: PegboardError) -> None:
        """End the stream with an exception, which the consumer gets when it next wakes up."""
        if not self.stream.is_finished and not self.is_lost:
            self.stream.error = error
            self.is_lost = True
            self.wake.set()

    async def next_output(self) -> RequestOutput:
        """Return what is new since the last call, as soon as there is something. Raises the error
        with which the stream has ended."""
        stream = self.stream
        while True:
            await self.wake.wait()
            self.wake.clear()
            if stream.error is not None:
                raise stream.error
            if len(stream.late) > MANY_BYTES:
                await asyncio.to_thread(stream.add_late)
            if (output := stream.take()) is not None:
                return output


class RequestStreams:
    """By request id. modules: module → plugin, to name a plugin that failed."""

    def __init__(self, modules: Callable[[], Mapping[str, str]]) -> None:
        self._modules = modules
        self._streams: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, name: str, live: RequestStream) -> None:
        """Raises RequestError if the id is in use."""
        if name in self._streams:
            raise RequestError(
                f"request id {name!r} is in use by a running request", parameter="request_id"
            )
        self._streams[name] = live

    def remove(self, name: str) -> None:
        self._streams.pop(name, None)

    def named(self, ids: Collection[str]) -> list[str]:
        """Return the ids of the requests with these ids or response ids."""
        return [
            name for name, each in self._streams.items() if name in ids or each.response_id in ids
        ]

    def feed(self, deltas: Iterable[RequestDelta]) -> list[str]:
        """Hand deltas to their streams. Return the completions that the engine need not go on
        with."""
        ended = []
        for delta in deltas:
            live = self._streams.get(delta.request_id)
            if live is None:  # aborted while the delta was on its way
                continue
            stream = live.stream
            try:
                if stream.feed(delta):
                    ended.append(stream.key(delta.index))
            except Exception as error:
                # a tokenizer can raise anything, and other requests must get their tokens
                log.exception("the answer to request %s could not be decoded", delta.request_id)
                live.fail(Failure.of(blamed(error, self._modules) or error).error())
                ended.append(delta.request_id)
            if stream.has_news:
                live.wake.set()
        return ended

    def fail(self, name: str, error: PegboardError) -> None:
        """End one request with an error."""
        if live := self._streams.get(name):
            live.fail(error)

    def fail_all(self, error: EngineDeadError) -> None:
        """End all requests, because the engine is dead."""
        for live in self._streams.values():
            # one error for each stream, because raising adds to an exception's traceback
            live.fail(EngineDeadError(str(error)))
