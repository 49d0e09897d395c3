"""SIGTERM and Ctrl-C: the first one ends the server in order, and the second one ends it within
seconds in any case."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

LAST_S = 5.0
"""Seconds that the process may take to end after the second signal."""
NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Termination:
    """The handler of SIGTERM while the server does not handle it. It exits through the `finally`
    clauses, so that the engine process ends too.

    The exception is raised in whatever code runs, and some code drops it or turns it into another
    one: the creation of a class, a callback from C, a plugin that catches everything. Therefore
    `repeat` is called when startup is over or has failed."""

    _signum: int | None = None
    _count = 0

    def __call__(self, signum: int, frame: FrameType | None) -> NoReturn:
        self._signum = signum
        self.note()
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + signum)

    def note(self) -> None:
        """Count a signal. After the second one, the process prints its stacks and ends even if a
        thread does not return or code catches everything. A thread in C does this, and it needs no
        interpreter lock."""
        self._count += 1
        if self._count == 2:
            faulthandler.dump_traceback_later(LAST_S, exit=True)

    def repeat(self) -> None:
        """Raise the signal again if it has come."""
        if self._signum is not None:
            self._count -= 1
            signal.raise_signal(self._signum)


@contextlib.contextmanager
def stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGINT and SIGTERM while the running loop runs the block. Does nothing outside
    the main thread, where signals cannot be caught. If a `Termination` handles SIGTERM, it counts
    the signals, and after one it handles both from the end of the block on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in NUMBERS}
    termination = before[signal.SIGTERM]

    def on_signal() -> None:
        if isinstance(termination, Termination):
            before[signal.SIGINT] = termination
            termination.note()
        stop()

    for number in NUMBERS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
