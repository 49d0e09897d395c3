"""HTTP connections with time limits: a client that stops sending its request loses the
connection."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable

from starlette.types import Message
from uvicorn.protocols.http.h11_impl import H11Protocol

from pegboard.errors import RequestError
from pegboard.log import get_logger

log = get_logger(__name__)

HEAD_S = 30.0
"""How long a client may take to send the head of a request. The time of the first request begins
with the connection, that of later ones with their first byte."""

BODY_S = 60.0
BODY_BYTES_PER_S = 10_000
"""How long the body may take: BODY_S seconds, and one second more for every BODY_BYTES_PER_S that
have arrived."""

FILES_WANTED = 65535
FILES_KEPT = 128
"""The number of open files that are left for other things than connections."""


class SlowRequest(RequestError):
    """The body did not arrive in time."""

    status = 408


class TimedProtocol(H11Protocol):
    """Closes a connection whose request head takes longer than HEAD_S. When there are too many
    connections, the one that has waited longest for its head is closed."""

    waiting: "dict[TimedProtocol, None]" = {}
    """All connections without a request, the oldest first. One process runs one server."""
    most: int = 0
    """The most connections, 0 = no limit."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.head_timer: asyncio.TimerHandle | None = None
        self._await_head()
        if self.most and len(self.connections) > self.most and self.waiting:
            next(iter(self.waiting)).drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._has_head()
        elif not self.transport.is_closing() and self.timeout_keep_alive_task is None:
            self._await_head()

    def drop(self) -> None:
        """Close the connection at once."""
        self._has_head()
        self.transport.abort()

    def _await_head(self) -> None:
        if self not in self.waiting:
            self.waiting[self] = None
            self.head_timer = self.loop.call_later(HEAD_S, self.drop)

    def _has_head(self) -> None:
        self.waiting.pop(self, None)
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None


def limit_connections() -> None:
    """Allow this process as many open files as the system lets it have, and limit the connections
    to that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            log.warning(
                "at most %d connections are possible: the limit of open files cannot be raised: %s",
                soft,
                error,
            )
            wanted = soft
    TimedProtocol.most = max(1, (soft if soft == resource.RLIM_INFINITY else wanted) - FILES_KEPT)


def timed(receive: Callable[[], Awaitable[Message]]) -> Callable[[], Awaitable[Message]]:
    """Wrap `receive` so that it raises SlowRequest if the body does not arrive in time. After the
    body, there is no limit."""
    started = time.monotonic()
    num_bytes = 0
    is_whole = False

    async def limited() -> Message:
        nonlocal num_bytes, is_whole
        if is_whole:
            return await receive()
        left = started + BODY_S + num_bytes / BODY_BYTES_PER_S - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left)):
                message = await receive()
        except TimeoutError:
            raise SlowRequest(
                f"the request body did not arrive in time: {num_bytes} bytes in "
                f"{time.monotonic() - started:.0f} s"
            ) from None
        num_bytes += len(message.get("body", b""))
        is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    return limited
