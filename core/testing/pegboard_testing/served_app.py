"""The real application of some APIs, called in this process or served on a port. Tests of API
plugins send HTTP requests to it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette

from pegboard.interfaces.api import Api, ApiSetup, ApiSpec, EngineClient
from pegboard_server.app import build_app
from pegboard_server.server import run_server
from pegboard_server.settings import ServerConfig

MakeApis = Callable[[ApiSetup], Sequence[tuple[str, Api, ApiSpec]]]
"""The APIs to mount: name, implementation, spec."""


def make_app(
    make_apis: MakeApis,
    client: EngineClient,
    builtin_tools: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Starlette:
    """Return the application. settings: fields of ServerConfig."""
    config = ServerConfig(**settings)
    setup = ApiSetup(client, msgspec.structs.asdict(config), builtin_tools=builtin_tools or {})
    return build_app(make_apis(setup), client, config)


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Wait until the condition is true. After 20 s raise AssertionError, which names `what`."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.005)


@contextmanager
def posted(address: str, path: str, body: Mapping[str, Any]) -> Iterator[socket.socket]:
    """Open a connection to a server and send `body` as JSON. The client disconnects at the end of
    the block."""
    host, port = address.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(content)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + content)
        yield connection


@contextmanager
def serving(
    make_apis: MakeApis,
    client: EngineClient,
    builtin_tools: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[str]:
    """Run a real server on a free port in a thread, and yield its address."""
    config = ServerConfig(
        port=0, disable_access_log=True, uvicorn_log_level="error", shutdown_timeout_s=1, **settings
    )
    app = make_app(make_apis, client, builtin_tools, **settings)
    ready: list[Any] = []
    is_ready = threading.Event()

    async def main() -> None:
        stop = asyncio.Event()

        def on_ready(address: str) -> None:
            ready.extend([address, asyncio.get_running_loop(), stop])
            is_ready.set()

        await run_server(app, config, on_ready=on_ready, stop=stop)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert is_ready.wait(20)
    try:
        yield ready[0]
    finally:
        ready[1].call_soon_threadsafe(ready[2].set)
        thread.join(20)
        assert not thread.is_alive()
