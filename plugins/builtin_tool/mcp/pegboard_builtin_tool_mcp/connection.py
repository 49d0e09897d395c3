"""One session with one MCP server. The session has its own task, because the task that enters the
library's contexts must also leave them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mcp import ClientSession
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import InitializeResult

from pegboard.errors import PegboardError
from pegboard.log import get_logger
from pegboard_builtin_tool_mcp.options import url_of

log = get_logger(__name__)

CLOSE_S = 2.0
"""How long closing the connection to a server may take."""


class NoAnswer(PegboardError):
    """A tool server cannot be reached."""


class Connection:
    """A connection that `session` opens and `close` closes. After `close`, it can be opened again.
    Only `server`, as the operator wrote it, is ever contacted. session_id identifies the client for
    servers that keep state."""

    def __init__(self, server: str, timeout_s: float, session_id: str | None = None) -> None:
        self.server = server
        self._timeout_s = timeout_s
        self._headers = {"x-session-id": session_id} if session_id else {}
        self._holding: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[tuple[ClientSession, InitializeResult]] | None = None
        self._stop = asyncio.Event()

    async def session(self) -> tuple[ClientSession, InitializeResult]:
        """Returns the session, and the server's description of itself. Raises NoAnswer."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._ready.add_done_callback(_mark_retrieved)
            self._holding = asyncio.create_task(self._hold(self._ready, self._stop))
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        """Close the session. It may be closed more than once, and without having been opened."""
        holding = self._holding
        ready = self._ready
        stop = self._stop
        self._holding = None
        self._ready = None
        self._stop = asyncio.Event()
        if holding is None or ready is None:
            return
        stop.set()
        if not ready.done():
            holding.cancel()
        _, late = await asyncio.wait({holding}, timeout=CLOSE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(holding, return_exceptions=True)

    async def _hold(
        self, ready: "asyncio.Future[tuple[ClientSession, InitializeResult]]", stop: asyncio.Event
    ) -> None:
        try:
            async with asyncio.timeout(self._timeout_s) as limit, self._opened() as session:
                answer = session, await session.initialize()
                limit.reschedule(None)
                ready.set_result(answer)
                await stop.wait()
        except Exception as error:  # noqa: BLE001
            # whatever the library and the network have, in groups
            cause = cause_of(error)
            if not ready.done():
                ready.set_exception(
                    NoAnswer(
                        f"no MCP server answers at {self.server} ({url_of(self.server)}): {cause}"
                    )
                )
            else:
                log.debug("the connection to the tool server %s ended with %s", self.server, cause)
        finally:
            ready.cancel()

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[ClientSession]:
        url = url_of(self.server)
        is_sse = url.rstrip("/").endswith("/sse")
        opened = sse_client(url, headers=self._headers) if is_sse else streamable_http_client(url)
        async with opened as (read, write), ClientSession(read, write) as session:
            yield session


def cause_of(error: BaseException) -> str:
    """Returns the cause of an error, taken out of its exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


def _mark_retrieved(future: "asyncio.Future[Any]") -> None:
    """Retrieves the error of a task that nothing waits for any more, so that asyncio does not
    report it."""
    if not future.cancelled():
        future.exception()
