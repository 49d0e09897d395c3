"""The engine processes of several API processes. The parent holds them and passes messages on. Each
API process has a `HubEngine`, which `AsyncLLM` uses like an `EngineProcess`.

Request ids are unique only within an API process. Therefore the number of the process is appended
to them on the way to the engine ("abc@1"). The parent passes messages to a single engine without
decoding them, and sorts the answers by that number. `Measured` and the end of the engine are sent
to every API process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from pegboard.engine.boundary.client import EngineLink, EngineProcess
from pegboard.engine.boundary.engines import Engines
from pegboard.engine.boundary.messages import (
    Abort,
    Add,
    Control,
    ControlReply,
    Dead,
    Failure,
    FromEngine,
    Measured,
    Ready,
    Rejected,
    Scaled,
    StepDeltas,
    ToEngine,
    encode,
)
from pegboard.errors import EngineDeadError
from pegboard.interfaces.metrics import Sample
from pegboard_server.turns import SharedTurns, TurnQueue

SHARED = b"shared:"
"""Prefix of a message that an API process sends to all others."""
TURNS = b"turns:"
"""Prefix of the messages of `turns.py`."""

HELLO = b"hello"
SERVING = b"serving"
STOP = b"stop"
"""HELLO: an API process is attached and waits for `Ready`. SERVING: it accepts connections. STOP:
it must finish its requests and exit."""


class EngineHub:
    """The parent's end of the connection. Used on one event loop, after the plan was sent to the
    engine.

    on_serving is called when all `count` API processes accept connections. on_end is called when
    the engine has died or did not start; `failure` then says why.
    """

    def __init__(
        self,
        engine: EngineProcess | Engines,
        count: int,
        on_serving: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self.failure: Exception | None = None
        self.started = False
        self._engine = engine
        self._count = count
        self._on_serving = on_serving
        self._on_end = on_end
        self._serving: set[bytes] = set()
        self._waiting: set[bytes] = set()
        self._early: list[bytes] = []
        self._ready: Ready | None = None
        self._last: bytes | None = None
        self._turns = TurnQueue(count, lambda name, data: self._send(int(name), TURNS + data))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.linger = 1000  # ms: leaves time to deliver the message about the engine's end
        self.address = f"ipc://{engine.folder / 'apis'}"
        self._socket.bind(self.address)

    def attach(self) -> None:
        """Pass messages on from now on."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._receive)
        self._engine.attach(self._from_engine, self._died)
        self._loop.call_soon(self._receive)

    def stop_apis(self) -> None:
        """Tell every API process to finish its requests and exit."""
        for index in range(self._count):
            self._send(index, STOP)

    def close(self) -> None:
        """Stop passing messages on. A second call does nothing."""
        if self._socket.closed:
            return
        self._engine.detach()  # it may still send
        self._loop.remove_reader(self._socket.FD)
        self._socket.close()
        self._context.term()

    def _send(self, index: int, data: bytes) -> None:
        self._socket.send_multipart([str(index).encode(), data])
        self._loop.call_soon(self._receive)  # the socket's file descriptor is edge-triggered

    def _receive(self) -> None:
        while not self._socket.closed:
            try:
                name, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if data == HELLO:
                self._greet(name)
            elif data == SERVING:
                self._serving.add(name)
                if len(self._serving) == self._count:
                    self._on_serving()
            elif data.startswith(TURNS):
                self._turns.receive(name, data.removeprefix(TURNS))
            elif data.startswith(SHARED):
                self._to_all(data.removeprefix(SHARED), but=name)
            else:
                self._engine.send_encoded(data)

    def _greet(self, name: bytes) -> None:
        self._waiting.add(name)
        self._turns.attach(name)
        if self._last is not None:
            self._send(int(name), self._last)
        elif self._ready is not None:
            self._send(int(name), encode(self._ready))
            for data in self._early:
                self._send(int(name), data)

    def _from_engine(self, message: FromEngine) -> None:
        if isinstance(message, StepDeltas):
            parts: dict[int, StepDeltas] = {}
            for delta in message.deltas:
                parts.setdefault(_index_of(delta.request_id), StepDeltas([])).deltas.append(delta)
            for index, part in parts.items():
                self._send(index, encode(part))
        elif isinstance(message, Rejected):
            self._send(_index_of(message.request_id), encode(message))
        elif isinstance(message, ControlReply):
            self._send(message.call_id % self._count, encode(message))
        else:
            if isinstance(message, Ready):
                self._ready = message
                self.started = True
            elif isinstance(message, Dead):
                self._end(message.failure.error(), encode(message))
                return
            self._to_all(encode(message))
            if isinstance(message, Measured) and len(self._waiting) < self._count:
                # counters add up, so a process that attaches later needs these too
                self._early.append(encode(message))

    def _died(self, error: EngineDeadError) -> None:
        self._end(error, encode(Dead(Failure.of(error))))

    def _end(self, failure: Exception, last: bytes) -> None:
        self.failure = failure
        self._last = last
        self._to_all(last)
        self._on_end()

    def _to_all(self, data: bytes, but: bytes = b"") -> None:
        for name in self._waiting:
            if name != but:
                self._send(int(name), data)


def _index_of(request_id: str) -> int:
    return int(request_id.rpartition("@")[2])


@dataclass
class SeenEngine:
    """One of the engines, as an API process watches it. folder: has its heart. stalled: see
    `EngineLink`."""

    folder: Path
    stalled: str = ""


class HubEngine(EngineLink):
    """An API process's end of the connection: the engines as `AsyncLLM` uses them. index is the
    number of this process among `count` API processes. folders: of the engines.

    on_stop is called when the parent wants this process to exit.
    """

    def __init__(
        self,
        address: str,
        index: int,
        count: int,
        folders: Sequence[Path],
        on_stop: Callable[[], None],
    ) -> None:
        super().__init__(address, identity=str(index).encode(), linger_ms=1000)
        self.parts = [SeenEngine(folder) for folder in folders]
        self._index = index
        self._count = count
        self._on_stop = on_stop
        self._mark = f"@{index}"
        self.turns = SharedTurns(lambda data: self.send_encoded(TURNS + data))

    @property
    def stalled(self) -> str:  # type: ignore[override]
        """Why an engine does not answer at present, or ""."""
        return next((part.stalled for part in self.parts if part.stalled), "")

    def attach(
        self, on_message: Callable[[FromEngine], None], on_death: Callable[[EngineDeadError], None]
    ) -> None:
        super().attach(lambda message: on_message(self._with_own_ids(message)), on_death)
        self.send_encoded(HELLO)

    def send(self, message: ToEngine) -> None:
        """Queue a message for the engine. Never blocks."""
        if isinstance(message, Add):
            request = msgspec.structs.replace(
                message.request, request_id=message.request.request_id + self._mark
            )
            message = msgspec.structs.replace(message, request=request)
        elif isinstance(message, Abort):
            message = msgspec.structs.replace(
                message, ids=[name + self._mark for name in message.ids]
            )
        elif isinstance(message, Control):
            message = msgspec.structs.replace(
                message, call_id=message.call_id * self._count + self._index
            )
        super().send(message)

    def share(self, sample: Sample) -> None:
        """Send `sample` to the other API processes, so that the sinks of each process show the
        whole server."""
        self.send_encoded(SHARED + encode(Measured(sample)))

    def tell_serving(self) -> None:
        """Tell the parent that this process accepts connections."""
        self.send_encoded(SERVING)

    def stop(self) -> None:
        """Close the socket. The engine keeps running; it belongs to the parent."""
        if not self._socket.closed:
            self.close()

    def _take(self, data: bytes) -> None:
        if data == STOP:
            self._on_stop()
        elif data.startswith(TURNS):
            self.turns.receive(data.removeprefix(TURNS))
        else:
            super()._take(data)

    def _with_own_ids(self, message: FromEngine) -> FromEngine:
        if isinstance(message, StepDeltas):
            for delta in message.deltas:
                delta.request_id = delta.request_id.removesuffix(self._mark)
        elif isinstance(message, Rejected):
            message.request_id = message.request_id.removesuffix(self._mark)
        elif isinstance(message, ControlReply):
            message.call_id //= self._count
        elif isinstance(message, Scaled):
            self.parts = [SeenEngine(Path(folder)) for folder in message.folders]
        return message
