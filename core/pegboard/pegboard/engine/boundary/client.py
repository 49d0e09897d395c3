"""The API process's end of the boundary. It starts the engine process, sends and receives messages,
notices when the engine dies, and cleans up."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import os
import pickle
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from pegboard.engine.boundary.messages import (
    Dead,
    FromEngine,
    Start,
    Stop,
    ToEngine,
    decode_from_engine,
    encode,
)
from pegboard.engine.boundary.spawn import BUILDER, Child, signals_wait
from pegboard.errors import ConfigError, EngineDeadError
from pegboard.log import get_logger

log = get_logger(__name__)

STOP_PATIENCE_S = (1.5, 5.0, 5.0)
"""Seconds to wait for the engine process to exit: after the `Stop` message, then after END_NOW,
then after SIGKILL."""

LAST_WORDS_S = 0.3
"""Seconds that the last message of a process may take to arrive after the process has ended."""

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""The signals of native code that fails."""

CRASH_ADVICE = (
    ": native code failed; PEGBOARD_CHECK=1 checks in every step what plugins return, and names "
    "the one that is wrong"
)


class EngineEnd:
    """This process's end of a connection to an engine. stalled: why the engine does not answer at
    present, set by whoever watches it; "" = it answers."""

    stalled = ""
    _on_message: Callable[[FromEngine], None] | None = None
    _on_death: Callable[[EngineDeadError], None] | None = None

    def attach(
        self, on_message: Callable[[FromEngine], None], on_death: Callable[[EngineDeadError], None]
    ) -> None:
        """Call `on_message` for every message, and `on_death` when the engine dies, on the running
        event loop."""
        self._on_message = on_message
        self._on_death = on_death

    def detach(self) -> None:
        """Stop the callbacks. Call it on the loop that called `attach`."""
        self._on_message = self._on_death = None

    def take(self, message: FromEngine) -> None:
        """Pass on a message of the engine."""
        if isinstance(message, Dead) and not message.is_start:
            self.died(message.failure.message)
            return
        # the engine did not start, so the end of its process is not reported again
        if isinstance(message, Dead):
            self._on_death = None
        if self._on_message is not None:
            self._on_message(message)

    def died(self, reason: str) -> None:
        """Report the end of the engine. A second call does nothing."""
        on_death = self._on_death
        self._on_death = None
        if on_death is not None:
            on_death(EngineDeadError(reason))


class EngineLink(EngineEnd):
    """A socket to the engine. After `attach`, the running event loop calls back for every message
    and when the engine dies."""

    def __init__(self, address: str, *, identity: bytes = b"", linger_ms: int = 0) -> None:
        self.folder = Path(address.removeprefix("ipc://")).parent
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = linger_ms
        # milliseconds between connection attempts until the engine listens
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if identity:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(address)
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(
        self, on_message: Callable[[FromEngine], None], on_death: Callable[[EngineDeadError], None]
    ) -> None:
        super().attach(on_message, on_death)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._receive)
        self._loop.call_soon(self._receive)

    def send(self, message: ToEngine) -> None:
        """Send a message without blocking. Messages to a dead engine are dropped."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send a message that is already encoded."""
        if self._socket.closed:
            return
        self._socket.send(data)
        # the socket's file descriptor is edge-triggered: sending may have used up an edge
        if self._loop is not None:
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        while not self._socket.closed and self._on_message is not None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        self.take(decode_from_engine(data))

    def detach(self) -> None:
        super().detach()
        if self._loop is not None and not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
        self._loop = None

    def close(self) -> None:
        """Stop the callbacks and close the socket."""
        self.detach()
        self._socket.close()
        self._context.term()


class EngineProcess(EngineLink):
    """One engine process and the socket to it. The constructor starts the process. Any thread may
    call it.

    The socket is in a new folder that only this user can open. `stop` removes the socket and the
    folder. It also runs when the program exits. If this process is killed, the engine process
    removes them. If both are killed, the next EngineProcess does. role: its name in log lines.
    """

    def __init__(self, builder: str = BUILDER, *, role: str = "engine") -> None:
        with signals_wait():
            socket_folder, self._lock = new_folder()
            address = f"ipc://{socket_folder / 'engine'}"
            super().__init__(address)
            self._has_plan = False
            function = "pegboard.engine.boundary.process:run"
            folder = str(self.folder)
            self._process = Child(
                function, role=role, folder=folder, address=address, builder=builder
            )
            self.pid = self._process.pid
            atexit.register(self.stop)

    @property
    def parts(self) -> "Sequence[EngineProcess]":
        """The processes of single engines."""
        return (self,)

    def start(self, plan: Any, *, wants_samples: bool = False) -> None:
        """Send the plan. The engine answers with `Ready` or `Dead`. wants_samples: the engine also
        sends its measurements."""
        self._has_plan = True
        self.send(Start(pickle.dumps(plan), wants_samples))

    def attach(
        self, on_message: Callable[[FromEngine], None], on_death: Callable[[EngineDeadError], None]
    ) -> None:
        super().attach(on_message, on_death)
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._exited)

    def _exited(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        self._process.join(1)
        advice = CRASH_ADVICE if -(self._process.exitcode or 0) in CRASHES else ""
        # its last message, which may still be on its way, says more
        loop.call_later(
            LAST_WORDS_S,
            self.died,
            f"the engine process exited ({self._process.how_it_ended()}){advice}",
        )

    def died(self, reason: str) -> None:
        if self._on_death is not None:
            log.error("%s", reason)
        super().died(reason)

    def detach(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._process.sentinel)
        super().detach()

    def kill(self) -> None:
        """End the process at once. `stop` cleans up."""
        self._process.kill()

    def stop(self) -> None:
        """Ask the process to stop, kill it if it does not, and remove the socket. Blocks until the
        process has ended. A second call does nothing."""
        if self._socket.closed:
            return
        self.detach()
        self.send(Stop())
        atexit.unregister(self.stop)
        # without a plan the process is still importing, so there is nothing to shut down
        self._process.end(STOP_PATIENCE_S if self._has_plan else (0.0, *STOP_PATIENCE_S[1:]))
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


_PREFIX = "pegboard-engine-"


def new_folder() -> tuple[Path, int | None]:
    """Create a folder that only this user can open (mode 0700). Return it and the descriptor that
    keeps it locked, or None if the file system has no locks. The folder is in /tmp if the path
    below TMPDIR would be too long for a socket. The folders of processes that were killed are
    removed. Raises ConfigError."""
    try:
        return _new_folder()
    except OSError as error:
        # tempfile finds no folder that it can write, or the disk is full
        raise ConfigError(
            f"no folder for the engine's socket can be made: {error.strerror or error}; free some "
            "space there, or set TMPDIR to a folder that can be written"
        ) from error


def _new_folder() -> tuple[Path, int | None]:
    length = len(os.fsencode(tempfile.gettempdir())) + len(f"/{_PREFIX}12345678/engine")
    root = Path("/tmp" if length > zmq.IPC_PATH_MAX_LEN else tempfile.gettempdir())
    for left in root.glob(f"{_PREFIX}*"):
        if (lock := _locked(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    # another process may remove a folder that is not locked yet, because it looks abandoned
    for _ in range(2):
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        if (lock := _locked(folder)) is not None:
            return folder, lock
        shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root)), None


def _locked(folder: Path) -> int | None:
    """Lock a folder of this user until the descriptor that is returned is closed, or this process
    ends. Return None if another process has locked it, or if it is gone."""
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        status = os.fstat(number)
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (
            status.st_uid == os.geteuid()
            and stat.S_IMODE(status.st_mode) == 0o700
            and folder.exists()
        ):
            return number
    os.close(number)
    return None
