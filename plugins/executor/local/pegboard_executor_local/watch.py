"""Notices ranks that die: their process has ended without being told to, or it is stopped."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path

from pegboard.interfaces.executor import ChildProcess, WorkerDeath
from pegboard_executors.deaths import FirstDeath

LOOK_S = 0.5
"""Seconds between two looks at the processes."""

STOPPED_LOOKS = 3
"""A process that is stopped in so many consecutive looks counts as dead. Looks are counted and not
seconds, because Ctrl-Z and `fg` also stop the process that looks."""

REAP_S = 1.0
"""Seconds in which a process that has closed its link gets its exit code."""


class Watch(FirstDeath):
    """A thread that waits until one of the processes dies. It kills the others at once, because
    they would wait for the dead one in a collective.

    wake: is called after that in the thread, to wake whoever waits for the ranks."""

    def __init__(self, children: Sequence[ChildProcess], wake: Callable[[], None]) -> None:
        super().__init__()
        self._children = children
        self._wake = wake
        self._stopped_looks = [0] * len(children)
        self._is_over = False
        self._end_reader, self._end_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="pegboard-ranks", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop watching. Processes that end from now on do not count as deaths. A second call does
        nothing."""
        if not self._is_over:
            self._is_over = True
            os.close(self._end_writer)
            # garbage collection may call this in that thread
            if self._thread is not threading.current_thread():
                self._thread.join()
            os.close(self._end_reader)

    def _run(self) -> None:
        ends = [*(child.sentinel for child in self._children), self._end_reader]
        death = None
        while death is None:
            ready = wait(ends, LOOK_S)
            if self._is_over:
                return
            death = self._look(is_due=not ready)
        for child in self._children:
            child.kill()
        self.announce(death, self._wake)

    def _look(self, is_due: bool) -> WorkerDeath | None:
        """Return a rank that has died. is_due: no process has closed its link since the last
        look."""
        limit = time.monotonic() + (0 if is_due else REAP_S)
        while True:
            for rank, child in enumerate(self._children):
                if child.exitcode is not None:
                    return WorkerDeath(rank, child.how_it_ended())
            if time.monotonic() >= limit:
                break
            time.sleep(0.005)
        if not is_due:
            return None
        for rank, child in enumerate(self._children):
            looks = self._stopped_looks[rank] + 1 if is_stopped(child.pid) else 0
            self._stopped_looks[rank] = looks
            if looks == STOPPED_LOOKS:
                return WorkerDeath(rank, "it is stopped (SIGSTOP), and was killed")
        return None


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped with SIGSTOP or SIGTSTP."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[:1] == ["T"]
