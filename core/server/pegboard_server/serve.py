"""`pegboard serve [model]`: the HTTP server with the engine in a process of its own."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from pegboard import env
from pegboard.config.schema import check_server
from pegboard.interfaces.command import CommandSetup, FlagParser
from pegboard.log import set_up_logging

if TYPE_CHECKING:
    from pegboard.config.schema import Settings
    from pegboard.plan.engine_plan import EnginePlan
    from pegboard.plugins.registry import Registry

MAX_QUEUED = 8192
"""max_num_queued_reqs of a server that was told nothing: strangers fill this queue, and every one in it is memory."""


def make_parser(setup: CommandSetup) -> FlagParser:
    """All flags of the command."""
    parser = setup.parser(
        prog="pegboard serve",
        usage="pegboard serve [MODEL] [--config FILE] [--SETTING VALUE ...]",
        description="Serve a model over HTTP. Options of plugins: --kind.name.field VALUE (see pegboard help kind.name). "
        "--help=WORD shows the flags of a group (engine, server, plugins, vllm) or those that match.",
    )
    parser.add_settings("server", "engine", "plugins")
    return parser


class Serve:
    """The command, as core builds it."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._parser = make_parser(setup)

    def run(self, words: Sequence[str]) -> int:
        """Serve until told to stop; 1 when the engine died."""
        settings, _ = self._parser.parse_settings(words, {"engine": {"max_num_queued_reqs": MAX_QUEUED}})
        check_server(settings.server)
        set_up_logging(env.log_level())
        before = signal.signal(signal.SIGTERM, _on_terminate)
        try:
            return serve(settings)
        finally:
            signal.signal(signal.SIGTERM, before)


def _on_terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM while starting: leave through the `finally` clauses, so that the engine process ends too."""
    sys.exit(128 + signum)


def serve(settings: "Settings") -> int:
    """Serve in this process, with SIGTERM already taken care of."""
    from pegboard.engine.boundary.client import EngineProcess

    engine = EngineProcess()  # first of all: it has seconds of imports to do
    try:
        from pegboard_server.listener import LoadingAnswer, bind_socket
        from pegboard_server.logs import apply_log_config
        from pegboard_server.tls import tls_arguments

        if settings.server.log_config_file is not None:
            apply_log_config(settings.server.log_config_file)
        tls_arguments(settings.server)
        listener = bind_socket(settings.server)
        loading = LoadingAnswer(listener)
        if settings.server.ssl_certfile is None:  # without TLS only: a plain answer there would look like a broken server
            loading.open()
        try:
            plan, registry = _start_engine(settings, engine)
            return asyncio.run(_run(plan, registry, engine, listener, loading.close))
        finally:
            loading.close()
    finally:
        engine.stop()


def _start_engine(settings: "Settings", engine: Any) -> "tuple[EnginePlan, Registry]":
    from pegboard_server.api_process import start_engine

    return start_engine(settings, engine)


async def _run(plan: "EnginePlan", registry: "Registry", engine: Any, listener: Any, on_loaded: "Callable[[], None]") -> int:
    from pegboard_server.api_process import make_client, serve_client

    def announce(address: str) -> None:
        print(f"Serving {', '.join(plan.model_names)} on {address}", flush=True)

    if plan.settings.server.api_server_count == 1:
        return await serve_client(make_client(plan, registry, engine), listener, on_ready=announce, on_loaded=on_loaded)
    from pegboard_server.api_processes import ApiProcesses

    on_loaded()
    return await ApiProcesses(plan, engine, listener, announce).run()
