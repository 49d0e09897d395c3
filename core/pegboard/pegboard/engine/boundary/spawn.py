"""Starts the engine process and the API processes. The parent and the child each notice when the
other one ends. `multiprocessing` with "spawn" would do the same, but it would import the user's
script again and start a resource tracker, another process of 12 MiB.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from pegboard import env
from pegboard.errors import ConfigError
from pegboard.log import set_up_logging

BUILDER = "pegboard.engine.build:build_engine"
"""The function that builds an engine from its plan. Importing it takes seconds, because it imports
torch."""

END_NOW = signal.SIGUSR1
"""The signal that `Child.end` sends to a child that has not ended by itself. It is not SIGTERM,
because that may also come from outside, while running requests should still finish."""

END_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})

_BOOT = (
    "import json, socket, sys; link = socket.socket(fileno=int(sys.argv[1])); "
    "start = json.loads(link.makefile().readline()); sys.path[:] = start['path']; "
    "from pegboard.engine.boundary.spawn import enter; enter(link, sys.argv[2], start)"
)


class Child:
    """Runs a function ("module:function") with `arguments` in a new interpreter, which has the
    flags and the module path of this one.

    role: the name of the process in log lines. arguments: values that JSON can encode. pass_fds:
    file descriptors that the child inherits under the same numbers. folder: a folder that the child
    removes if this process dies first. The child starts with SIGINT and SIGTERM blocked (see
    `signals_wait`). It ignores SIGINT, because Ctrl-C reaches the whole process group
    and the parent decides when to stop. It calls `take_signals` once it has a handler for SIGTERM.
    It exits at once when this process dies.
    """

    def __init__(
        self,
        function: str,
        *,
        role: str,
        folder: str | None = None,
        pass_fds: Sequence[int] = (),
        **arguments: Any,
    ) -> None:
        self._link, other = socket.socketpair()
        start = {
            "path": sys.path,
            "role": role,
            "level": env.log_level(),
            "folder": folder,
            "arguments": arguments,
        }
        # as multiprocessing does
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with other, signals_wait():
            command = [sys.executable, *flags, "-c", _BOOT, str(other.fileno()), function]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[other.fileno(), *pass_fds]
            )
        self._link.sendall(json.dumps(start).encode() + b"\n")
        self.pid = self._process.pid
        self.kill = self._process.kill
        self.end_now = partial(self._process.send_signal, END_NOW)

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process ends."""
        return self._link.fileno()

    @property
    def exitcode(self) -> int | None:
        """The exit status. It is None while the process runs, and negative if a signal killed it:
        minus the number of the signal."""
        return self._process.poll()

    def join(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the process to end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def end(self, patience_s: tuple[float, float, float]) -> None:
        """Wait for the process to end. If it does not, send END_NOW and wait, then send SIGKILL and
        wait. patience_s: seconds to wait each time. The link is closed in any case."""
        attempts = zip(patience_s, (self.end_now, self.kill, None), strict=True)
        for seconds, harder in attempts:
            self.join(seconds)
            if self.exitcode is not None or harder is None:
                break
            harder()
        self._link.close()

    def how_it_ended(self) -> str:
        code = self.exitcode
        if code is None:
            return "still going"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block, so that no half-started process remains.
    The child inherits the signal mask, so it gets no signal before it has its handlers. The mask
    alone is not enough for this process: other threads, such as those of a math library, also
    receive signals, and Python runs the handlers on the main thread."""
    arrived: list[int] = []
    handlers = {}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    # only the main thread can set handlers
    if threading.current_thread() is threading.main_thread():
        handlers = {
            number: signal.signal(number, lambda number, _: arrived.append(number))
            for number in END_SIGNALS
        }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for pending in arrived:
            signal.raise_signal(pending)


def take_signals(on_terminate: Any) -> None:
    """Handle SIGTERM with `on_terminate` (a handler or SIG_IGN) from now on. The function that a
    child runs calls this."""
    signal.signal(signal.SIGTERM, on_terminate)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)


def load_function(name: str) -> Callable[..., Any]:
    """Import and return the function that "module:function" names. Raises ConfigError if it needs
    torch and torch is not installed."""
    module, _, function = name.partition(":")
    try:
        target: Callable[..., Any] = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(
            "running a model needs torch, which is not installed: pip install 'pegboard[torch]'"
        ) from error
    return target


def enter(link: socket.socket, function: str, start: dict[str, Any]) -> None:
    """The entry point of the new interpreter. It exits without tearing down its modules, because
    that takes long for large ones."""
    code: Any = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(
            target=_leave_with_parent,
            args=(link, start["folder"]),
            name="watch-parent",
            daemon=True,
        ).start()
        set_up_logging(start["level"], start["role"])
        load_function(function)(**start["arguments"])
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001
        # the outermost code of the process, which must report every error
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _leave_with_parent(link: socket.socket, folder: str | None) -> None:
    """Wait until the parent is gone, remove its folder, and exit at once."""
    link.recv(1)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
