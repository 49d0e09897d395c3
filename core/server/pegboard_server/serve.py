"""`pegboard serve [model]`: the HTTP server, with the engine in its own process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from pegboard import env
from pegboard.interfaces.command import CommandSetup, FlagParser
from pegboard.log import set_up_logging
from pegboard_server.settings import ServerConfig, check_server
from pegboard_server.stopping import Termination

if TYPE_CHECKING:
    import socket

    from pegboard.config.schema import Settings
    from pegboard.engine.boundary.client import EngineProcess
    from pegboard.engine.boundary.engines import Engines
    from pegboard.plan.engine_plan import EnginePlan

MAX_QUEUED = 8192
"""The server's default for max_num_queued_reqs. Anyone can fill the queue of a server, and every
queued request takes memory."""


def make_parser(setup: CommandSetup) -> FlagParser:
    """The parser with all flags of the command."""
    parser = setup.parser(
        prog="pegboard serve",
        usage="pegboard serve [MODEL] [--config FILE] [--SETTING VALUE ...]",
        description="Serve a model over HTTP. Options of plugins: --kind.name.field VALUE "
        "(see pegboard help kind.name). "
        "--help=WORD shows the flags of a group (engine, server, plugins, vllm) or the flags that "
        "match WORD.",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="log every choice and why it was made (log level DEBUG)",
    )
    parser.add_settings("server", "engine", "plugins")
    return parser


class Serve:
    """The command `serve`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._parser = make_parser(setup)

    def run(self, words: Sequence[str]) -> int:
        """Serve until told to stop. Returns 1 when the engine died."""
        settings, arguments = self._parser.parse_settings(
            words, {"engine": {"max_num_queued_reqs": MAX_QUEUED}}
        )
        server = settings.section(ServerConfig)
        check_server(server)
        if settings.engine.max_loras or server.lora_modules or server.lora_resolvers:
            from pegboard_server.adapters import check_adapters

            check_adapters(settings)
        if arguments.verbose:
            env.log_everything()
        set_up_logging(env.log_level())
        run = serve
        if server.headless and settings.engine.nnodes > 1:
            from pegboard_server.headless import run_ranks as run
        elif server.headless:
            from pegboard_server.engine_host import run_engines as run
        termination = Termination()
        before = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, termination),
            signal.SIGINT: signal.getsignal(signal.SIGINT),
        }
        try:
            return run(settings, termination.repeat)
        except Exception:
            termination.repeat()  # the exit may have turned into an error
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(settings: "Settings", on_started: Callable[[], object] = lambda: None) -> int:
    """Serve in this process. The caller has already set the handler of SIGTERM. on_started: called
    once connections are accepted."""
    from pegboard_server.engines import start_engines

    # started first: its imports take seconds
    engine = start_engines(settings)
    try:
        from pegboard_server.listener import LoadingAnswer, bind_socket
        from pegboard_server.logs import apply_log_config
        from pegboard_server.tls import tls_arguments

        server = settings.section(ServerConfig)
        if server.log_config_file is not None:
            apply_log_config(server.log_config_file)
        tls_arguments(server)
        listener = bind_socket(server)
        loading = LoadingAnswer(listener)
        # without TLS only: a plain answer there would look like a broken server
        if server.ssl_certfile is None:
            loading.open()
        try:
            if server.api_server_count == 1:
                return _serve_here(settings, engine, listener, loading.close, on_started)
            return _serve_in_children(settings, engine, listener, loading.close, on_started)
        finally:
            loading.close()
            listener.close()
    finally:
        engine.stop()


def _serve_here(
    settings: "Settings",
    engine: "EngineProcess | Engines",
    listener: "socket.socket",
    on_loaded: Callable[[], None],
    on_started: Callable[[], object],
) -> int:
    from pegboard.front.async_llm import AsyncLLM
    from pegboard_server.api_process import serve_client
    from pegboard_server.http_metrics import HTTP_METRICS

    with _watched(settings):
        client = AsyncLLM.from_settings(settings, engine=engine, metrics=HTTP_METRICS)
    on_ready = partial(_announce, client.plan, on_started)
    return asyncio.run(
        serve_client(client, listener, engine, on_ready=on_ready, on_loaded=on_loaded)
    )


def _serve_in_children(
    settings: "Settings",
    engine: "EngineProcess | Engines",
    listener: "socket.socket",
    on_loaded: Callable[[], None],
    on_started: Callable[[], object],
) -> int:
    from pegboard.front.async_llm import start_engine
    from pegboard_server.api_processes import ApiProcesses

    with _watched(settings):
        plan, _ = start_engine(settings, engine)
    on_loaded()

    async def run() -> int:
        return await ApiProcesses(
            plan, engine, listener, partial(_announce, plan, on_started)
        ).run()

    return asyncio.run(run())


def _watched(settings: "Settings") -> AbstractContextManager[None]:
    """Log plugins that hang while the model is found and fetched. The engine process watches
    itself."""
    from pegboard.plugins.registry import Registry
    from pegboard_server.watchdog import loading_watched

    return loading_watched(lambda: Registry.discover(settings.plugins).modules())


def _announce(plan: "EnginePlan", on_started: Callable[[], object], address: str) -> None:
    model = plan.settings.engine.model or plan.model_names[0]
    print(f"Serving {', '.join(plan.model_names)} on {address}")
    print(
        (
            f"If it is slow: pegboard plugins why --model {model} shows what was chosen, pegboard "
            "serve -v logs more"
        ),
        flush=True,
    )
    on_started()
