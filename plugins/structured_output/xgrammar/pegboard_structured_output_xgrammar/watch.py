"""Calls the library on another thread where a call may take very long. A thread cannot be stopped,
but it can be left behind.

The time of a mask or a token has no limit in the library. It grows with the cube of the text for an
ambiguous rule (`a ::= a a`), and with the square for repeats of repeats (`([a-z]+ ?)+`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from pegboard.errors import RequestError

MAX_LEFT = 3
"""The number of calls that were left behind and still run. While this many run, the library
gets no more such constraints."""


BUSY = 5
"""How many times the limit a call may take that gets less than half of a processor, because other
programs keep it busy."""


class _Worker:
    """One thread and its jobs."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="xgrammar", daemon=True)
        self.thread.start()

    def used_s(self) -> float:
        """Return the processor time of the thread in seconds."""
        assert self.thread.ident is not None
        return (
            time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))
            if self.thread.is_alive()
            else 0.0
        )

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                self.results.put((job(), None))
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                self.results.put((None, error))


class Watch:
    """Runs calls with a time limit. Used from any thread; each call waits for its own result."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._left: list[_Worker] = []

    def is_full(self) -> bool:
        """Return whether too many calls that were left behind still run."""
        self._left = [worker for worker in self._left if worker.thread.is_alive()]
        return len(self._left) >= MAX_LEFT

    def call(self, job: Callable[[], Any], limit_s: float) -> Any:
        """Return the result of `job` or raise its exception. Raises RequestError when it takes over
        `limit_s` seconds. It then goes on with the lowest priority, and its result is dropped.
        Nothing that it uses may be used again."""
        worker = self._idle.pop() if self._idle else _Worker()
        used = worker.used_s()
        worker.jobs.put(job)
        for _ in range(BUSY):
            try:
                result, error = worker.results.get(timeout=limit_s)
                break
            except queue.Empty:
                if worker.used_s() - used > limit_s / 2:  # else it waits for the processor
                    self._leave(worker, limit_s)
        else:
            self._leave(worker, limit_s * BUSY)
        self._idle.append(worker)
        if error is not None:
            raise error
        return result

    def _leave(self, worker: _Worker, limit_s: float) -> NoReturn:
        worker.jobs.put(None)
        self._left.append(worker)
        _lower_priority(worker.thread)
        reason = (
            f"xgrammar: one call took over {limit_s:g} s; simplify the constraint, for example "
            "repeats of repeats"
        )
        raise RequestError(reason, parameter="structured_outputs") from None


def _lower_priority(thread: threading.Thread) -> None:
    if hasattr(os, "setpriority") and thread.native_id is not None:
        with contextlib.suppress(OSError):  # it has just ended
            # on Linux, a priority belongs to a thread
            os.setpriority(os.PRIO_PROCESS, thread.native_id, 19)
