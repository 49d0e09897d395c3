"""The servers behind the proxy: which of them are healthy, and how much work they have."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from pegboard.log import get_logger

log = get_logger(__name__)

HEALTH_TIMEOUT_S = 5.0


@dataclass(eq=False, slots=True)
class Server:
    """One server. url: without a slash at its end. role: "prefill", "decode" or "server". running:
    requests that the proxy has sent to it and whose answers have not ended. running_of: how many of
    them by the engine that the proxy chose. reason: why it is not healthy."""

    url: str
    role: str
    is_healthy: bool = False
    reason: str = "not asked yet"
    running: int = 0
    running_of: Counter[int] = field(default_factory=Counter, repr=False)
    requests: int = 0
    failures: int = 0
    order: int = field(default=0, repr=False)

    @contextmanager
    def working(self, rank: int | None = None) -> Iterator[None]:
        """Count one request while the block runs. rank: of the engine that the proxy chose."""
        self.running += 1
        self.requests += 1
        chosen = [] if rank is None else [rank]
        self.running_of.update(chosen)
        try:
            yield
        finally:
            self.running -= 1
            self.running_of.subtract(chosen)

    def failed(self, reason: str) -> None:
        """The server cannot be reached. It gets no requests until a health check succeeds."""
        if self.is_healthy:
            log.warning("%s is left out until it is healthy again: %s", self.url, reason)
        self.is_healthy = False
        self.reason = reason
        self.failures += 1


async def check(server: Server, client: httpx.AsyncClient) -> None:
    """Ask the server's /health once."""
    try:
        answer = await client.get(f"{server.url}/health", timeout=HEALTH_TIMEOUT_S)
    except httpx.HTTPError as error:
        server.failed(describe(error))
        return
    if answer.status_code != 200:
        server.failed(f"/health answers {answer.status_code}")
        return
    if not server.is_healthy:
        log.info("%s (%s) is healthy", server.url, server.role)
    server.is_healthy = True
    server.reason = ""


async def watch(servers: Sequence[Server], client: httpx.AsyncClient, interval_s: float) -> None:
    """Ask all servers again and again, until cancelled."""
    while True:
        await asyncio.gather(*(check(server, client) for server in servers))
        await asyncio.sleep(interval_s)


def describe(error: Exception) -> str:
    """Return what an error of httpx says, which may be nothing, after its name."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
