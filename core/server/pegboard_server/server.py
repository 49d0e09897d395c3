"""The HTTP server: signals, shutdown, and exit when the engine has died. `app` builds the
application that it serves.

listener = bind_socket(config)                    # before the model loads: a taken port shows at
once code = await run_server(app, config, listener=listener, health=client.health, on_ready=print,
traffic=traffic)

When asked to stop, the server lets running requests finish. New requests get 503. It closes when
the last request is done, or after `shutdown_timeout_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from pegboard.errors import ConfigError
from pegboard.interfaces.api import Health
from pegboard.log import get_logger
from pegboard_server.connections import TimedProtocol, limit_connections
from pegboard_server.gateway import Traffic
from pegboard_server.listener import BACKLOG, address_of, bind_error, bind_socket
from pegboard_server.logs import access_log
from pegboard_server.settings import ServerConfig
from pegboard_server.stopping import stop_signals
from pegboard_server.tls import keep_fresh, tls_arguments

log = get_logger(__name__)

HEALTH_INTERVAL_S = 0.5
CUT_OFF_S = 1.0
"""How long cancelled requests may take to end."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process before the engine is shut
    down."""

    def __init__(self, config: uvicorn.Config, traffic: Traffic | None, timeout_s: float) -> None:
        super().__init__(config)
        self._traffic = traffic
        self._timeout_s = timeout_s
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Finish the running requests within the shutdown timeout. When asked a second time, do not
        wait."""
        if self._draining is not None or self._traffic is None:
            self.force_exit = self.should_exit or self._draining is not None
            self.should_exit = True
            return
        self._traffic.stop()
        self._draining = asyncio.get_running_loop().create_task(self._drain(self._traffic))

    async def _drain(self, traffic: Traffic) -> None:
        deadline = time.monotonic() + self._timeout_s
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(traffic.wait_until_idle(), self._timeout_s)
        if traffic.num_running:  # what is left of the timeout is for uvicorn's own waiting
            self.config.timeout_graceful_shutdown = max(0, deadline - time.monotonic())  # type: ignore[assignment]
        self.should_exit = True


async def run_server(
    app: ASGIApp,
    config: ServerConfig,
    *,
    listener: socket.socket | None = None,
    health: Callable[[], Health] | None = None,
    on_ready: Callable[[str], object] | None = None,
    stop: asyncio.Event | None = None,
    traffic: Traffic | None = None,
    catch_signals: bool = True,
) -> int:
    """Serve until SIGINT or SIGTERM, until `stop` is set, or until `health` says that the engine is
    dead.

    Returns the exit code of the program: 0, or 1 when the engine died. `on_ready` is called with
    the address once connections are accepted. Running requests get `shutdown_timeout_s` to finish.
    After that they are cancelled, which aborts them in the engine. Takes ownership of `listener`.
    With `traffic` (the application's), new requests get 503 while the server drains; without it,
    new connections are not accepted. Raises ConfigError if the address cannot be used for
    listening, or if the TLS files cannot be used.
    """
    listener = listener or bind_socket(config)
    try:
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise bind_error(error, config.host, config.port) from error
    address = address_of(listener, config)
    limit_connections()
    try:
        server = _Server(_uvicorn_config(app, config), traffic, config.shutdown_timeout_s)
    except ConfigError:
        listener.close()
        raise
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    watching = asyncio.create_task(_watch(server, health, on_ready, address, stop))
    context = server.config.ssl if config.enable_ssl_refresh else None
    refreshing = asyncio.create_task(keep_fresh(context, config)) if context is not None else None
    try:
        with (
            access_log(config),
            stop_signals(server.stop) if catch_signals else contextlib.nullcontext(),
        ):
            await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
            # on_ready or health raised: stop, then raise it
            if watching.done() and watching.exception() is not None:
                server.should_exit = True
            await serving
            await _cut_off(server)
    finally:
        watching.cancel()
        serving.cancel()
        if refreshing is not None:
            refreshing.cancel()
        outcome = (await asyncio.gather(watching, serving, return_exceptions=True))[0]
        listener.close()
        if config.uds:
            Path(config.uds).unlink(missing_ok=True)
    if isinstance(outcome, Exception):
        raise outcome
    return 1 if outcome is False else 0


async def _cut_off(server: _Server) -> None:
    """End the requests that ran past the shutdown timeout, while the engine still runs and can
    abort them."""
    tasks = list(server.server_state.tasks)
    for task in tasks:
        if not task.cancelling():  # uvicorn leaves them running when it was told not to wait
            task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CUT_OFF_S)


async def _watch(
    server: _Server,
    health: Callable[[], Health] | None,
    on_ready: Callable[[str], object] | None,
    address: str,
    stop: asyncio.Event | None,
) -> bool:
    """Call on_ready once the server accepts connections, then watch the engine. Returns False when
    the engine died and True when asked to stop."""
    while not server.started:
        await asyncio.sleep(0.005)
    if on_ready is not None:
        on_ready(address)
    while stop is None or not stop.is_set():
        state = health() if health is not None else None
        if state is not None and not state.is_alive:
            log.error(
                "the engine has died, so the server stops: %s", state.reason or "no reason known"
            )
            server.should_exit = True
            return False
        if stop is None:
            await asyncio.sleep(HEALTH_INTERVAL_S)
        else:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), HEALTH_INTERVAL_S)
    server.stop()
    return True


def _uvicorn_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    settings = uvicorn.Config(
        app,
        http=TimedProtocol,
        log_config=None,
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_access_log,
        lifespan="off",
        ws="none",
        server_header=False,
        # typed int, used as a timeout
        timeout_graceful_shutdown=config.shutdown_timeout_s,  # type: ignore[arg-type]
        h11_max_incomplete_event_size=config.h11_max_incomplete_event_size,
        **tls_arguments(config),
    )
    settings.load()
    # uvicorn would log its start and end; Pegboard logs these itself
    if config.uvicorn_log_level == "info":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return settings
