"""A's end of the boundary: starts the engine process, sends, receives, notices its death, leaves nothing behind."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import pickle
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from pegboard import env
from pegboard.engine.boundary.builder import BUILDER
from pegboard.engine.boundary.messages import Dead, FromEngine, Start, Stop, ToEngine, decode_from_engine, encode
from pegboard.engine.boundary.spawn import END_SIGNALS, Child
from pegboard.errors import EngineDeadError
from pegboard.interfaces.metrics import Sample
from pegboard.log import get_logger

log = get_logger(__name__)

STOP_PATIENCE_S = (1.5, 5.0, 5.0)
"""How long the engine process may take to leave after the `Stop` message, then after SIGTERM, then after SIGKILL."""


class EngineProcess:
    """One engine process and the socket to it. Created (and so started) on any thread; `attach` binds it to an event loop.

    The socket lies in a new folder that only this user can open; both vanish with `stop`, which also runs at exit.
    """

    def __init__(self, builder: str = BUILDER) -> None:
        with _signals_wait():
            self.folder = _new_folder()
            self._context = zmq.Context()
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.set_hwm(0)
            self._socket.linger = 0
            address = f"ipc://{self.folder / 'engine'}"
            self._socket.setsockopt(zmq.RECONNECT_IVL, 20)  # ms between attempts until the engine listens
            self._socket.connect(address)
            self._loop: asyncio.AbstractEventLoop | None = None
            self._on_message: Callable[[FromEngine], None] | None = None
            self._on_death: Callable[[EngineDeadError], None] | None = None
            self._has_plan = False
            self._is_stopped = False
            self._process = Child("pegboard.engine.boundary.process.run", address=address, builder=builder, level=env.log_level())
            atexit.register(self.stop)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, plan: Any, *, wants_samples: bool = False) -> None:
        """Send the plan; the engine answers `Ready` or `Dead`. wants_samples: send what the engine measures, too."""
        self._has_plan = True
        self.send(Start(pickle.dumps(plan), wants_samples))

    def send(self, message: ToEngine) -> None:
        """Hand over a message; never blocks. Messages to a dead engine vanish."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """`send` for a message that is encoded already."""
        if self._is_stopped:
            return
        self._socket.send(data)
        if self._loop is not None:  # the socket's file descriptor is edge-triggered: sending may have used up an edge
            self._loop.call_soon(self._receive)

    def share(self, sample: Sample) -> None:
        """What was measured in this process, for other API processes: there are none on this engine."""

    def attach(self, on_message: Callable[[FromEngine], None], on_death: Callable[[EngineDeadError], None]) -> None:
        """Deliver messages and the death of the process on the running event loop, from now on."""
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_death = on_message, on_death
        self._loop.add_reader(self._socket.FD, self._receive)
        self._loop.add_reader(self._process.sentinel, self._exited)
        self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        while not self._is_stopped and self._on_message is not None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = decode_from_engine(data)
            if isinstance(message, Dead) and not message.is_start:
                self._died(f"the engine died: {message.failure.message}")
                continue
            if isinstance(message, Dead):  # it never lived: the reason is the news, not that the process ends now
                self._on_death = None
            self._on_message(message)

    def _exited(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._process.sentinel)
        self._receive()  # its last words may still be in the socket
        self._process.join(1)
        self._died(f"the engine process exited ({_describe(self._process.exitcode)})")

    def _died(self, reason: str) -> None:
        on_death, self._on_death = self._on_death, None
        if on_death is not None:
            log.error("%s", reason)
            on_death(EngineDeadError(reason))

    def detach(self) -> None:
        """Stop delivering; call on the loop that attached."""
        if self._loop is not None and not self._is_stopped:
            self._loop.remove_reader(self._socket.FD)
            self._loop.remove_reader(self._process.sentinel)
        self._loop = self._on_message = self._on_death = None

    def stop(self) -> None:
        """End the process, politely first, and remove the socket. Blocks until it is gone; calling again does nothing."""
        if self._is_stopped:
            return
        self.detach()
        self.send(Stop())
        self._is_stopped = True
        atexit.unregister(self.stop)
        for patience_s, harder in zip(STOP_PATIENCE_S, (self._process.terminate, self._process.kill, None), strict=True):
            if self._has_plan or harder != self._process.terminate:  # without a plan it only imports: nothing to end politely
                self._process.join(patience_s)
            if self._process.exitcode is not None or harder is None:
                break
            harder()
        self._process.close()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self.folder, ignore_errors=True)


def _new_folder() -> Path:
    """Only this user can open it (mode 0700). In /tmp where the user's own choice is too deep for the path of a socket."""
    length = len(os.fsencode(tempfile.gettempdir())) + len("/pegboard-12345678/engine")
    return Path(tempfile.mkdtemp(prefix="pegboard-", dir="/tmp" if length > zmq.IPC_PATH_MAX_LEN else None))


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """SIGINT and SIGTERM take effect afterwards: no half-made process is left behind, and none hits the child before it has its
    handlers (it inherits the mask and lifts it itself). The mask alone would not do for this process: other threads, such as a
    math library's, receive signals too, and their handlers run on the main thread."""
    arrived: list[int] = []
    handlers = {}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    if threading.current_thread() is threading.main_thread():  # handlers run nowhere else
        handlers = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for pending in arrived:
            signal.raise_signal(pending)


def _describe(exitcode: int | None) -> str:
    if exitcode is None:
        return "still going"
    return f"signal {signal.Signals(-exitcode).name}" if exitcode < 0 else f"code {exitcode}"
