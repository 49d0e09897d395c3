"""The API process (A): runs the HTTP server, which serves the API plugins with one engine client.

With one API process, it is the program itself (`pegboard serve`). With several
(`--api-server-count`), each is a child process. The children share the listening socket and connect
to the parent's engine (`hub.py`). The kernel hands every new connection to one of them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.config.data_parallel import engine_number
from pegboard.errors import PegboardError
from pegboard.interfaces.api import Health
from pegboard.log import get_logger
from pegboard_server.settings import ServerConfig

if TYPE_CHECKING:
    from pegboard.engine.boundary.client import EngineProcess
    from pegboard.engine.boundary.engines import Engines
    from pegboard.front.async_llm import AsyncLLM
    from pegboard.interfaces.metrics import Sample
    from pegboard.plan.engine_plan import EnginePlan
    from pegboard_server.hub import HubEngine
    from pegboard_server.turns import Turns

log = get_logger(__name__)

Announce = Callable[[str], object]


async def serve_client(
    client: "AsyncLLM",
    listener: socket.socket,
    engine: "EngineProcess | Engines | HubEngine | None" = None,
    *,
    on_ready: Announce,
    on_loaded: Callable[[], object] = lambda: None,
    stop: asyncio.Event | None = None,
    catch_signals: bool = True,
    share: Callable[[Sample], None] | None = None,
    turns: "Turns | None" = None,
) -> int:
    """Serve `client` through all enabled APIs until told to stop. Returns the exit code of the
    program. engine: that of the client; its process is watched. on_loaded is called once the engine
    is ready, just before the server takes the listener. share sends what this process measures to
    the other API processes. turns: those in which the API processes change what all must know."""
    from pegboard_server.app import load_adapters, open_app
    from pegboard_server.gateway import Traffic
    from pegboard_server.memory import keep_little
    from pegboard_server.server import run_server
    from pegboard_server.watchdog import LoopGuard, watch_engines

    keep_little()
    config = client.plan.settings.section(ServerConfig)
    traffic = Traffic(config.max_running_requests)

    first = engine_number(client.plan.settings.engine)

    def publish(sample: Sample) -> None:
        sample.engine = first
        client.publish(sample)
        if share is not None:
            share(sample)

    app = await open_app(client, traffic, publish if client.sinks else None, turns)
    hooks = _hooks(client)
    async with client:
        await load_adapters(app)
        if hooks is not None:
            hooks[0].call("pegboard_role_started", hooks[1])
        on_loaded()
        gc.collect()
        # what is loaded now stays; a collection that looks at all of it takes up to 0.3 s in a
        # large request
        gc.freeze()
        watching = (
            asyncio.create_task(watch_engines(engine, config)) if engine is not None else None
        )
        try:
            with LoopGuard(client.registry.modules, config.plugin_call_s).active():
                return await run_server(
                    app,
                    config,
                    listener=listener,
                    health=partial(_life, client),
                    on_ready=on_ready,
                    stop=stop,
                    traffic=traffic,
                    catch_signals=catch_signals,
                )
        finally:
            if watching is not None:
                watching.cancel()
            if hooks is not None:
                hooks[0].call("pegboard_role_stopping", hooks[1])


def _life(client: "AsyncLLM") -> Health:
    """Whether the engine has died. The server outlives an engine that has only stalled."""
    return Health(not client.errored, str(client.dead_error))


def _hooks(client: "AsyncLLM") -> tuple[Any, Any] | None:
    """Returns the enabled hooks and the role that is passed to them. None: no hook is enabled."""
    if not client.registry.enabled_hooks():
        return None
    from pegboard.interfaces.hooks import Role
    from pegboard.plugins.hooks import Hooks

    return Hooks(client.registry), Role("api")


def run_child(
    index: int, count: int, plan_file: str, address: str, folders: list[str], listener_fd: int
) -> None:
    """The body of one of `count` API processes: serves until the parent says stop. The parent
    handles signals. Exits with 1 when the engine died, and with 3 when serving could not start.
    plan_file holds the pickled plan. address is that of the parent's hub.
    folders: of the engines."""
    from pegboard.engine.boundary.spawn import take_signals

    take_signals(signal.SIG_IGN)
    try:
        plan = pickle.loads(Path(plan_file).read_bytes())
        code = asyncio.run(
            _serve_child(plan, index, count, address, folders, socket.socket(fileno=listener_fd))
        )
    except PegboardError as error:
        log.error("%s", error, exc_info=log.isEnabledFor(logging.DEBUG))
        code = 3
    raise SystemExit(code)


async def _serve_child(
    plan: "EnginePlan",
    index: int,
    count: int,
    address: str,
    folders: list[str],
    listener: socket.socket,
) -> int:
    from pegboard.front.async_llm import AsyncLLM
    from pegboard.plugins.registry import Registry
    from pegboard_server.http_metrics import HTTP_METRICS
    from pegboard_server.hub import HubEngine
    from pegboard_server.logs import apply_log_config

    if (log_config := plan.settings.section(ServerConfig).log_config_file) is not None:
        apply_log_config(log_config)
    stop = asyncio.Event()
    engine = HubEngine(address, index, count, [Path(folder) for folder in folders], stop.set)
    registry = Registry.from_lock(plan.lock)
    client = AsyncLLM.of_plan(plan, registry, engine, metrics=HTTP_METRICS)
    return await serve_client(
        client,
        listener,
        engine,
        on_ready=lambda _: engine.tell_serving(),
        stop=stop,
        catch_signals=False,
        share=engine.share,
        turns=engine.turns,
    )
