"""The API process (A): an engine client, the API plugins around it, and the server around them.

With one API process it is the program itself (`pegboard serve`). With several (`--api-server-count`) each is a child that gets
the listening socket and a door to the parent's engine (`engine/hub.py`); the kernel hands every new connection to one of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable
from multiprocessing import connection, parent_process
from typing import TYPE_CHECKING, Any

import msgspec

from pegboard.errors import PegboardError
from pegboard.log import get_logger, set_up_logging

if TYPE_CHECKING:
    from pegboard.config.schema import Settings
    from pegboard.engine.boundary.client import EngineProcess
    from pegboard.front.async_llm import AsyncLLM
    from pegboard.plan.engine_plan import EnginePlan
    from pegboard.plugins.registry import Registry

log = get_logger(__name__)

Announce = Callable[[str], object]


def start_engine(settings: "Settings", engine: "EngineProcess") -> "tuple[EnginePlan, Registry]":
    """Resolve the plan and send it to the engine process. Raises what `plan.resolve` raises."""
    from pegboard.plan.engine_plan import resolve
    from pegboard.plan.metrics_plugins import sink_entries

    plan, registry = resolve(settings)
    engine.start(plan, wants_samples=not settings.engine.disable_log_stats and bool(sink_entries(registry, plan, "api")))
    return plan, registry


def open_client(settings: "Settings") -> "AsyncLLM":
    """A client with an engine process of its own, as the APIs use it; `async with` waits until it is ready."""
    from pegboard.engine.boundary.client import EngineProcess

    engine = EngineProcess()
    try:
        plan, registry = start_engine(settings, engine)
        return make_client(plan, registry, engine)
    except BaseException:
        engine.stop()
        raise


def make_client(plan: "EnginePlan", registry: "Registry", engine: Any) -> "AsyncLLM":
    """The client of an engine that has been sent its plan. engine: an `EngineProcess` or a `HubEngine`."""
    from pegboard.front.async_llm import AsyncLLM
    from pegboard.plan.engine_plan import make_tokenizer
    from pegboard.plan.metrics_plugins import build_sinks
    from pegboard_server.http_metrics import HTTP_METRICS

    sinks = build_sinks(registry, plan, "api")
    tokenizer = None if plan.settings.engine.skip_tokenizer_init else make_tokenizer(registry, plan)
    return AsyncLLM.from_parts(plan, registry, tokenizer, engine, sinks=sinks, metrics=HTTP_METRICS)


async def serve_client(
    client: "AsyncLLM",
    listener: socket.socket,
    *,
    on_ready: Announce,
    on_loaded: Callable[[], object] = lambda: None,
    stop: asyncio.Event | None = None,
    catch_signals: bool = True,
) -> int:
    """Serve `client` through all enabled APIs until told to stop; the exit code of the program. on_loaded: called once the engine
    is ready, just before the server takes the listener."""
    from pegboard_server.app import open_app
    from pegboard_server.gateway import Traffic
    from pegboard_server.server import run_server

    config = client.plan.settings.server
    traffic = Traffic(config.max_running_requests)
    app = await open_app(client, traffic, client.publish if client.sinks else None)
    hooks = _hooks(client)
    async with client:
        if hooks is not None:
            hooks[0].role_started(hooks[1])
        on_loaded()
        try:
            return await run_server(
                app, config, listener=listener, health=client.health, on_ready=on_ready, stop=stop, traffic=traffic,
                catch_signals=catch_signals,
            )  # fmt: skip
        finally:
            if hooks is not None:
                hooks[0].role_stopping(hooks[1])


def _hooks(client: "AsyncLLM") -> tuple[Any, Any] | None:
    """The enabled hooks and the role they are told; None when there are none."""
    if not client.registry.enabled_hooks():
        return None
    from pegboard.interfaces.hooks import Role
    from pegboard.plugins.hooks import Hooks

    return Hooks(client.registry), Role("api")


# --- one of several -----------------------------------------------------------------------------------------------------------


class ApiTask(msgspec.Struct, frozen=True):
    """What a child is told. index: of `count`. plan: the pickled `EnginePlan`. address: of the parent's hub."""

    index: int
    count: int
    plan: bytes
    address: str
    level: str


def run_api(task: ApiTask, listener: socket.socket) -> None:
    """Body of a child: serves until the parent says stop or is gone. Signals are the parent's business, because Ctrl-C reaches
    the whole process group. Exits with 1 when the engine died, and with 3 when it could not start."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    _watch_parent()
    set_up_logging(task.level, f"api {task.index}")
    try:
        code = asyncio.run(_serve_one(task, listener))
    except PegboardError as error:
        log.error("%s", error, exc_info=log.isEnabledFor(logging.DEBUG))
        code = 3
    raise SystemExit(code)


async def _serve_one(task: ApiTask, listener: socket.socket) -> int:
    from pegboard.engine.boundary.hub import HubEngine
    from pegboard.plugins.lock import PluginLock
    from pegboard.plugins.registry import Registry
    from pegboard_server.logs import apply_log_config

    plan: EnginePlan = pickle.loads(task.plan)
    if plan.settings.server.log_config_file is not None:
        apply_log_config(plan.settings.server.log_config_file)
    stop = asyncio.Event()
    engine = HubEngine(task.address, task.index, task.count, stop.set)
    client = make_client(plan, Registry.from_lock(PluginLock.from_json(plan.lock_json)), engine)
    return await serve_client(
        client, listener, on_ready=lambda _: engine.tell_serving(), stop=stop, catch_signals=False
    )  # fmt: skip


def _watch_parent() -> None:
    parent = parent_process()
    if parent is None:  # called directly, not as a child
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
