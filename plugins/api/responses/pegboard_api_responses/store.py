"""Stored responses, kept in memory within limits: the oldest is removed first. It also keeps the
events of background responses."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pegboard.errors import RequestError
from pegboard_api_responses.open_items import StreamEvent
from pegboard_api_responses.options import ResponsesOptions
from pegboard_chat.off_loop import SMALL_BYTES, off_loop
from pegboard_server.json_api import in_pieces
from pegboard_server.streaming import named_event


class EventEncoder:
    """Encodes the events of one response and numbers them from 0."""

    def __init__(self) -> None:
        self._number = 0

    async def encode(self, events: Sequence[StreamEvent], num_bytes: int) -> list[bytes]:
        """Return the encoded events. num_bytes: the size of the whole response, which all events
        repeat that are not deltas. If it is large, they are encoded in a thread."""
        numbered = [
            {**event, "sequence_number": number}
            for number, event in enumerate(events, self._number)
        ]
        self._number += len(events)
        if num_bytes < SMALL_BYTES or all("delta" in event for event in events):
            return [named_event(event) for event in numbered]
        return await off_loop(
            num_bytes, lambda: [named_event(event, in_pieces) for event in numbered]
        )


class EventLog:
    """The events of a response that is written in the background. Any number of readers can read
    them. Each reader may start at any event and stop at any time."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._encoder = EventEncoder()
        self._events: list[bytes] = []
        self._has_ended = False
        self._news = asyncio.Event()

    async def add(self, events: Sequence[StreamEvent], num_bytes: int = 0) -> None:
        """Add events and wake the readers. num_bytes: as for `EventEncoder.encode`."""
        encoded = await self._encoder.encode(events, num_bytes)
        self._events += encoded
        self.num_bytes += sum(map(len, encoded))
        self._wake()

    def end(self) -> None:
        """Tell the readers that no more events follow."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def read(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yields the events after number `after`: first those that exist, then the others as they
        arrive."""
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


class UnknownResponse(RequestError):
    """The store does not have this response."""

    status = 404


@dataclass(slots=True)
class Stored:
    """A stored response. `response` is the object. `messages` is the conversation up to and
    including it, without instructions. While `task` writes it in the background, `live` returns the
    response so far. events is set for a response that is, or was, streamed in the background.
    num_bytes is its approximate size. input_items: the items that it answers, each with an id."""

    response: Mapping[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    task: "asyncio.Task[None] | None" = None
    live: Callable[[], Mapping[str, Any]] | None = None
    events: EventLog | None = None
    num_bytes: int = 0
    input_items: Sequence[Mapping[str, Any]] = ()

    def now(self) -> Mapping[str, Any]:
        """The object as it is now."""
        return self.live() if self.live is not None else self.response


class ResponseStore:
    """Responses by id. A response that is written in the background is not removed until it is
    done."""

    def __init__(self, options: ResponsesOptions, *, is_on: bool = True) -> None:
        self.is_on = is_on and options.max_stored > 0
        self._options = options
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._num_bytes = 0

    def put(self, stored: Stored, num_bytes: int) -> None:
        """Store a response. It replaces one with the same id. Then remove the oldest ones over the
        limits."""
        name = str(stored.response["id"])
        known = self._stored.pop(name, None)
        if known is not None:
            self._num_bytes -= known.num_bytes
        stored.num_bytes = num_bytes
        self._stored[name] = stored
        self._num_bytes += num_bytes
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        for name in list(self._stored):
            if (
                len(self._stored) <= self._options.max_stored
                and self._num_bytes <= self._options.max_stored_bytes
            ):
                return
            if self._stored[name].task is None:
                self.delete(name)

    def get(self, name: str, parameter: str) -> Stored:
        """Returns the response with this id. Raises UnknownResponse naming `parameter`."""
        if not self.is_on:
            why = "max_stored is 0, or several API processes share the address"
            raise UnknownResponse(
                f"this server keeps no responses ({why}); send the whole conversation",
                parameter=parameter,
            )
        stored = self._stored.get(name)
        if stored is None:
            raise UnknownResponse(
                f"Response with id {name[:200]!r} not found.", parameter=parameter
            )
        return stored

    def delete(self, name: str) -> None:
        """Remove a response. Unknown ids are ignored."""
        stored = self._stored.pop(name, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes
