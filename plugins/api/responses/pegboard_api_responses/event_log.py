"""The stream's events: as server-sent events with numbers, and kept for clients that come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from pegboard_api_responses.open_items import StreamEvent
from pegboard_server.streaming import named_event


class EventEncoder:
    """Numbers the events of one response from 0."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, events: Sequence[StreamEvent]) -> list[bytes]:
        encoded = []
        for event in events:
            encoded.append(named_event({**event, "sequence_number": self._number}))
            self._number += 1
        return encoded


class EventLog:
    """The events of a response that is written in the background. Any number of readers, each from where it wants to begin; one
    that leaves changes nothing."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._encode = EventEncoder()
        self._events: list[bytes] = []
        self._has_ended = False
        self._news = asyncio.Event()

    def add(self, events: Sequence[StreamEvent]) -> None:
        """Some more, for all who read."""
        encoded = self._encode(events)
        self._events += encoded
        self.num_bytes += sum(map(len, encoded))
        self._wake()

    def end(self) -> None:
        """There will be no more."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def read(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events behind number `after`: those that are there together, then more as they come, to the end."""
        start = after + 1
        while True:
            if start < len(self._events):
                end = len(self._events)
                yield b"".join(self._events[start:end])
                start = end
            elif self._has_ended:
                return
            else:
                await self._news.wait()
