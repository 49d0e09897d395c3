"""Real MCP servers on localhost, in threads of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

StartServer = Callable[..., str]


def make_server(name: str) -> MCPServer:
    """Tools of several kinds, one with a counter per session."""
    server = MCPServer(name)
    seen: dict[int, int] = {}

    @server.tool(name=name if name == "python" else "run", description="Runs code")
    def run(code: str) -> str:
        return f"ran {code}"

    @server.tool(description="Adds two numbers")
    def add(x: int, y: int) -> int:
        seen[x] = seen.get(x, 0) + 1
        return x + y

    @server.tool()
    def fail(why: str) -> str:
        raise ToolError(why)

    @server.tool()
    async def wait() -> str:
        await asyncio.sleep(3600)
        return "late"

    return server


class Running:
    """A server in a thread."""

    def __init__(self, name: str, *, streamable: bool = False, port: int = 0) -> None:
        self.socket = socket.create_server(("127.0.0.1", port))
        self.port = self.socket.getsockname()[1]
        self.address = (
            f"http://127.0.0.1:{self.port}/mcp" if streamable else f"127.0.0.1:{self.port}"
        )
        server = make_server(name)
        app: Any = server.streamable_http_app() if streamable else server.sse_app()
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(20)
        self.socket.close()
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Running]]:
    """`start(name, streamable=False)`: a server that runs until the end of the module."""
    running: list[Running] = []

    def start(name: str, **more: Any) -> Running:
        running.append(Running(name, **more))
        return running[-1]

    yield start
    for server in running:
        server.stop()
