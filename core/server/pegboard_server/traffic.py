"""What passes through the server at this moment: how many requests, and whether more are let in."""

from __future__ import annotations

import asyncio

from pegboard.errors import Overloaded, RequestError


class Stopping(RequestError):
    """The server stops and takes nothing new, or stops before it has an answer (HTTP 503)."""

    status = 503


class Traffic:
    """Shared by the gateway, which counts, and the server, which stops. Used on one event loop.

    max_running: requests in work at once; more are refused, so that a flood costs answers and not memory.
    """

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self.num_running = 0
        self.is_stopping = False
        self._change = asyncio.Event()

    def enter(self, *, is_public: bool) -> None:
        """Count a request in. Public paths (health checks) are always let in, except while stopping, which is their answer.
        Raises Stopping, Overloaded."""
        if self.is_stopping:
            raise Stopping("the server is stopping and takes no new requests")
        if self.num_running >= self.max_running and not is_public:
            raise Overloaded(f"{self.num_running} requests are in work, the most this server takes (max_running_requests)")
        self.num_running += 1

    def leave(self) -> None:
        """Count it out."""
        self.num_running -= 1
        self._change.set()

    def stop(self) -> None:
        """Let nothing in from now on."""
        self.is_stopping = True
        self._change.set()

    async def wait_until_idle(self) -> None:
        """Until no request is in work."""
        while self.num_running:
            self._change.clear()
            await self._change.wait()
