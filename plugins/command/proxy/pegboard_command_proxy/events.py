"""Follows the KV events that engines publish over ZeroMQ, and keeps `Prefixes` up to date."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from pegboard.log import get_logger
from pegboard_command_proxy.prefixes import Engine, Prefixes

log = get_logger(__name__)

END = -1
"""The number after the last batch of a replay."""
REPLAY_S = 2.0
"""Seconds that the engine may take for the next batch of a replay."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """url: the server that publishes the events. endpoint, replay: ZeroMQ addresses. Without
    `replay`, blocks whose events were lost are not known."""

    url: str
    endpoint: str
    replay: str | None = None

    @property
    def engine(self) -> Engine:
        """The engine that publishes."""
        return Engine(self.url, self.endpoint)

    def check(self) -> None:
        """Raises ValueError if ZeroMQ cannot connect to an address of this form."""
        for address in (self.endpoint, self.replay):
            if address is None:
                continue
            with zmq.Context.instance().socket(zmq.SUB) as socket:
                try:
                    socket.connect(address)
                except zmq.ZMQError as error:
                    raise ValueError(f"{address} cannot be used: {error}") from error


async def follow(source: EventSource, prefixes: Prefixes) -> None:
    """Tell `prefixes` what the engine publishes, until cancelled."""
    context = zmq.asyncio.Context.instance()
    with context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(source.endpoint)
        follower = Follower(source, prefixes)
        await follower.catch_up(0)
        while True:
            frames = await socket.recv_multipart()
            if len(frames) == 3:
                await follower.take(int.from_bytes(frames[1], "big"), frames[2])


class Follower:
    """Takes the numbered batches of one engine in order. next: the number that is expected."""

    def __init__(self, source: EventSource, prefixes: Prefixes) -> None:
        self._source = source
        self._prefixes = prefixes
        self.next = 0
        self._last = -1

    async def take(self, number: int, payload: bytes) -> None:
        """Take a published batch. A number that is not larger than that of the last one means that
        the engine was started again; a gap, that batches were lost."""
        if number <= self._last:
            self._prefixes.forget(self._source.engine)
            self.next = 0
        self._last = number
        if number > self.next:
            await self.catch_up(number)
        if number >= self.next:
            self._apply(number, payload)

    async def catch_up(self, until: int) -> None:
        """Take the batches before number `until` that the engine still has; 0 means all. If they
        cannot be had, forget the engine's blocks: one of them may be gone."""
        async for number, payload in self._earlier():
            if number >= self.next:
                self._apply(number, payload)
        if self.next < until:
            if self.next:
                self._prefixes.forget(self._source.engine)
            self.next = until

    def _apply(self, number: int, payload: bytes) -> None:
        self.next = number + 1
        try:
            _, events, *rest = msgspec.msgpack.decode(payload)
            rank = rest[0] if rest and isinstance(rest[0], int) else None
            self._prefixes.follow(self._source.engine, events, rank)
        except (msgspec.DecodeError, TypeError, ValueError, IndexError) as error:
            log.warning("the KV events of %s cannot be read: %s", self._source.url, error)
            self._prefixes.forget(self._source.engine)

    async def _earlier(self) -> AsyncIterator[tuple[int, bytes]]:
        if self._source.replay is None:
            return
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._source.replay)
            await socket.send_multipart([b"", self.next.to_bytes(8, "big")])
            with contextlib.suppress(asyncio.TimeoutError):
                while True:
                    frames = await asyncio.wait_for(socket.recv_multipart(), REPLAY_S)
                    at = int.from_bytes(frames[-2], "big", signed=True) if len(frames) == 3 else END
                    if at == END:
                        return
                    yield at, frames[-1]
