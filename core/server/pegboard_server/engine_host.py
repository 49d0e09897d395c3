"""`pegboard serve --headless` on a host that runs some of the engines of another host's server."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from pegboard.config.data_parallel import headless_engines
from pegboard.engine.boundary.messages import (
    Dead,
    Failure,
    FromEngine,
    Start,
    Stop,
    decode_to_engine,
    encode,
)
from pegboard.env import required_cluster_key
from pegboard.errors import ConfigError, PegboardError
from pegboard.log import get_logger
from pegboard_server import other_hosts as hosts
from pegboard_server.settings import ServerConfig
from pegboard_server.stopping import stop_signals
from pegboard_server.watchdog import LOOK_S, WatchedEngine, heart_of, watch_engines

if TYPE_CHECKING:
    from pegboard.config.schema import Settings
    from pegboard.plan.engine_plan import EnginePlan

log = get_logger(__name__)

FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
DISCONNECTED = zmq.EVENT_DISCONNECTED


def run_engines(settings: "Settings", on_started: Callable[[], object] = lambda: None) -> int:
    """Run the engines of this host until the server ends. Return 0 if it has stopped in order, else
    1. on_started: called before they run. Raises ConfigError or PluginBroken if the server and this
    host do not fit together."""

    async def run() -> int:
        host = EngineHost(settings)
        try:
            with stop_signals(host.end):
                on_started()
                return await host.run()
        finally:
            host.close()

    return asyncio.run(run())


class RelayedEngine(WatchedEngine):
    """An engine of this host. relay: gets its messages, encoded."""

    def __init__(self, number: int, relay: Callable[[bytes], None]) -> None:
        super().__init__(role=f"engine {number}")
        self.is_started = False
        self._relay = relay

    def run(self, plan: "EnginePlan", *, wants_samples: bool) -> None:
        """Send the plan, and relay all messages from now on."""
        self.is_started = True
        self.start(plan, wants_samples=wants_samples)
        self.attach(self._send, lambda error: self._send(Dead(Failure.of(error))))

    def _take(self, data: bytes) -> None:
        self._relay(data)

    def _send(self, message: FromEngine) -> None:
        self._relay(encode(message))


class EngineHost:
    """The connection to the server, and the engines of this host. Used on one event loop."""

    def __init__(self, settings: "Settings") -> None:
        config = settings.engine
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[int] = self._loop.create_future()
        self._where = f"{config.data_parallel_address}:{config.data_parallel_rpc_port}"
        self._watching: list[asyncio.Task[None]] = []
        self._is_member = False
        self._engines: dict[int, RelayedEngine] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(FAILED | CONNECTED | DISCONNECTED)
        try:
            self._numbers = headless_engines(config)
            self._offer = hosts.Offer(
                socket.gethostname(),
                self._numbers.start,
                len(self._numbers),
                config.data_parallel_size,
            )
            hosts.secure(self._socket, required_cluster_key("engines"), listens=False)
            # started first: their imports take seconds
            for number in self._numbers:
                self._engines[number] = RelayedEngine(number, self._relay(number))
        except BaseException:
            self.close()
            raise

    @property
    def parts(self) -> Sequence[RelayedEngine]:
        return [*self._engines.values()]

    def _relay(self, number: int) -> Callable[[bytes], None]:
        return lambda data: self._send(hosts.MESSAGE, number, data)

    def end(self, code: int = 1) -> None:
        """End with this exit code, unless there is one already."""
        if not self._over.done():
            self._over.set_result(code)

    def _fail(self, error: PegboardError) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    async def run(self) -> int:
        """Wait for the server, and run its engines. Return the exit code."""
        log.info("waiting for the server at %s", self._where)
        self._loop.add_reader(self._monitor.FD, self._see_events)
        self._loop.add_reader(self._socket.FD, self._receive)
        self._socket.immediate = True  # nothing is queued for a connection that does not exist
        self._socket.connect(f"tcp://{self._where}")
        self._loop.call_soon(self._see_events)
        self._giving_up = self._loop.call_later(hosts.PATIENCE_S, self._give_up)
        try:
            return await self._over
        finally:
            self._giving_up.cancel()
            for task in self._watching:
                task.cancel()

    def close(self) -> None:
        """End all engines, tell the server that they have ended, and close the connection."""
        for engine in self._engines.values():
            engine.send(Stop())
        for engine in self._engines.values():
            engine.stop()
        self._loop.remove_reader(self._monitor.FD)
        self._loop.remove_reader(self._socket.FD)
        self._send(hosts.ENDED)
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def _send(self, kind: bytes, number: int = 0, content: bytes = b"") -> None:
        """Send a frame; it is dropped if the server is gone."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([kind, b"%d" % number, content], zmq.NOBLOCK)
        # the socket's file descriptor is edge-triggered: sending may have used up an edge
        self._loop.call_soon(self._receive)

    def _see_events(self) -> None:
        """Notice that the connection has been made, refused, or closed."""
        while not self._over.done() and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == CONNECTED:
                self._send(hosts.HELLO, content=msgspec.json.encode(self._offer))
            elif event == DISCONNECTED and self._is_member:
                log.error("the server has ended; its log says why")
                self.end()
            elif event & FAILED:
                self._fail(
                    ConfigError(
                        f"the process at {self._where} does not trust this host: set "
                        "PEGBOARD_CLUSTER_KEY to the same text on every host"
                    )
                )

    def _give_up(self) -> None:
        self._fail(
            ConfigError(
                f"no server listens at {self._where} for {hosts.PATIENCE_S:g} s; start pegboard "
                "serve there with the same data_parallel_address and data_parallel_rpc_port"
            )
        )

    def _receive(self) -> None:
        while not self._over.done() and not self._socket.closed:
            try:
                kind, number, content = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(kind, int(number), content)

    def _take(self, kind: bytes, number: int, content: bytes) -> None:
        if kind == hosts.CHECK:
            self._check(content)
        elif kind == hosts.REFUSED:
            self._fail(ConfigError(f"the server refuses this host: {content.decode()}"))
        elif kind == hosts.STOP:
            self.end(0 if content == hosts.IN_ORDER else 1)
        elif kind == hosts.KILL:
            self._engines[number].kill()
        elif kind == hosts.MESSAGE:
            engine = self._engines[number]
            if engine.is_started:
                engine.send_encoded(content)
            else:
                self._start(engine, content)

    def _check(self, check: bytes) -> None:
        """Agree to run engines if this host has the plugins of the server's."""
        try:
            pickle.loads(check)()
        except PegboardError as error:
            self._send(hosts.REFUSED, content=str(error).encode())
            self._fail(error)
            return
        self._is_member = True
        self._giving_up.cancel()
        self._send(hosts.AGREED)
        log.info("%s on this host, for the server", hosts.named(self._numbers))

    def _start(self, engine: RelayedEngine, content: bytes) -> None:
        """Start an engine with its plan, in which it gets its place on this host."""
        start = decode_to_engine(content)
        assert isinstance(start, Start)
        plan: EnginePlan = pickle.loads(start.plan)
        settings = plan.settings.with_engine(
            "data parallel",
            data_parallel_start_rank=self._numbers.start,
            data_parallel_size_local=len(self._numbers),
        )
        engine.run(replace(plan, settings=settings), wants_samples=start.wants_samples)
        if not self._watching:
            watching = watch_engines(self, settings.section(ServerConfig))
            self._watching += map(self._loop.create_task, (watching, self._send_hearts()))

    async def _send_hearts(self) -> None:
        """Let the server see which engine hangs."""
        while True:
            await asyncio.sleep(LOOK_S)
            for number, engine in self._engines.items():
                with contextlib.suppress(OSError):  # not written yet
                    self._send(hosts.HEART, number, heart_of(engine.folder).read_bytes())
