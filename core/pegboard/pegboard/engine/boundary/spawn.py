"""A Python process of our own, and the end of it that either side notices.

What `multiprocessing` does with "spawn", less what an engine has no use for: no second import of the user's script, and no
resource tracker, a process of 12 MiB per program.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from typing import Any

END_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
"""Whoever starts a child blocks these for a moment; the child lifts the block when it has its handlers."""

_BOOT = (
    "import json, socket, sys; link = socket.socket(fileno=int(sys.argv[1])); "
    "told = json.loads(link.makefile().readline()); sys.path[:] = told['path']; "
    "from pegboard.engine.boundary.spawn import enter; enter(link, told)"
)


class Child:
    """Runs `module.function(link, **arguments)` in a new interpreter with this one's flags and module path.

    link: in the child a socket, in which it reads the end of the file when this process is gone. arguments: what JSON can say.
    """

    def __init__(self, function: str, **arguments: Any) -> None:
        self._link, other = socket.socketpair()
        told = {"path": sys.path, "function": function, "arguments": arguments}
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as multiprocessing does
        with other:
            command = [sys.executable, *flags, "-c", _BOOT, str(other.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()])
        self._link.sendall(json.dumps(told).encode() + b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process ends."""
        return self._link.fileno()

    @property
    def exitcode(self) -> int | None:
        """None while it runs; the negative number of the signal that killed it."""
        return self._process.poll()

    def join(self, timeout_s: float) -> None:
        """Wait for its end, not longer than that."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Let go of a process that has ended, or that shall end by itself."""
        self._link.close()


def enter(link: socket.socket, told: dict[str, Any]) -> None:
    """What the new interpreter does. It leaves without tearing down its modules, which takes the large ones a while."""
    code = 1
    try:
        module, _, function = told["function"].rpartition(".")
        getattr(importlib.import_module(module), function)(link, **told["arguments"])
        code = 0
    except BaseException:  # noqa: BLE001 - the last one to hear of it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
