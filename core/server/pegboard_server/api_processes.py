"""Several API processes (`--api-server-count`). The parent starts them, passes
messages on, and ends them together.

Each process counts for itself towards `max_running_requests`. The engine is shared, and with it the
queue limit, the engine's metrics and the prefix cache.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from typing import TYPE_CHECKING

from pegboard.engine.boundary.spawn import Child, signals_wait
from pegboard.errors import ConfigError, EngineDeadError, PegboardError
from pegboard.log import get_logger
from pegboard_server.api_process import Announce
from pegboard_server.hub import EngineHub
from pegboard_server.listener import BACKLOG, address_of
from pegboard_server.settings import ServerConfig
from pegboard_server.stopping import stop_signals
from pegboard_server.watchdog import watch_engines

if TYPE_CHECKING:
    from pegboard.engine.boundary.client import EngineProcess
    from pegboard.engine.boundary.engines import Engines
    from pegboard.plan.engine_plan import EnginePlan

log = get_logger(__name__)

PATIENCE_S = 5.0
"""How long API processes may take to exit after the shutdown timeout."""


class ApiProcesses:
    """The parent's work, on one event loop. Takes ownership of `listener`."""

    def __init__(
        self,
        plan: "EnginePlan",
        engine: "EngineProcess | Engines",
        listener: socket.socket,
        on_ready: Announce,
    ) -> None:
        self._config = plan.settings.section(ServerConfig)
        self._count = self._config.api_server_count
        self._plan_file = engine.folder / "plan"  # only this user can read it
        self._plan_file.write_bytes(pickle.dumps(plan))
        self._engine = engine
        self._listener = listener
        self._on_ready = on_ready
        self._children: list[Child] = []
        self._ended = asyncio.Event()
        self._died: str | None = None
        self._hub = EngineHub(engine, self._count, self._announce, self._ended.set)

    async def run(self) -> int:
        """Serve until SIGINT or SIGTERM. Returns the exit code of the program, which is 1 when the
        engine or an API process died. Raises the error that stopped the engine from starting."""
        loop = asyncio.get_running_loop()
        watching: asyncio.Task[None] | None = None
        try:
            with stop_signals(self._stop):
                self._listen()
                self._hub.attach()
                self._start()
                watching = loop.create_task(watch_engines(self._engine, self._config))
                await self._ended.wait()
                self._hub.stop_apis()
                await self._wait_for_children()
        finally:
            if watching is not None:
                watching.cancel()
            for child in self._children:
                if child.exitcode is None:
                    child.kill()
            self._hub.close()
            self._listener.close()
        return self._outcome()

    def _listen(self) -> None:
        """Start to listen. This happens before the children start, because they accept from the
        parent's queue of connections."""
        try:
            self._listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address_of(self._listener, self._config)}: "
                f"{error.strerror or error}"
            ) from error

    def _start(self) -> None:
        fd = self._listener.fileno()
        for index in range(self._count):
            with signals_wait():
                child = Child(
                    "pegboard_server.api_process:run_child",
                    role=f"api {index}",
                    pass_fds=[fd],
                    index=index,
                    count=self._count,
                    plan_file=str(self._plan_file),
                    address=self._hub.address,
                    folders=[str(part.folder) for part in self._engine.parts],
                    listener_fd=fd,
                )
            self._children.append(child)
            asyncio.get_running_loop().add_reader(child.sentinel, self._child_ended, index)

    def _child_ended(self, index: int) -> None:
        child = self._children[index]
        asyncio.get_running_loop().remove_reader(child.sentinel)
        child.join(1)
        if not self._ended.is_set():
            self._died = f"API process {index} ended ({child.how_it_ended()})"
            log.error("%s, so the server stops", self._died)
            self._ended.set()

    def _announce(self) -> None:
        self._on_ready(address_of(self._listener, self._config))

    def _stop(self) -> None:
        """Stop. When asked a second time, kill the children instead of waiting for them."""
        if self._ended.is_set():
            for child in self._children:
                child.kill()
        self._ended.set()

    async def _wait_for_children(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._config.shutdown_timeout_s + PATIENCE_S
        while (
            any(child.exitcode is None for child in self._children)
            and asyncio.get_running_loop().time() < deadline
        ):
            await asyncio.sleep(0.02)

    def _outcome(self) -> int:
        failure = self._hub.failure
        if failure is not None and not self._hub.started and isinstance(failure, PegboardError):
            raise failure
        if isinstance(failure, EngineDeadError):
            log.error("the engine has died, so the server stops: %s", failure)
        return 1 if failure is not None or self._died is not None else 0
