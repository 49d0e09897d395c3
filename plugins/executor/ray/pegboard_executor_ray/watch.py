"""Notices ranks that die: their process or node has ended, or the process is stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from pegboard.interfaces.executor import WorkerDeath
from pegboard_executor_ray.node import is_stopped, on_node

LOOK_S = 0.25
"""Seconds between two looks at the ranks."""

LATE_S = 0.75
"""A ping that takes longer is a reason to look at the process."""


@dataclass
class Watched:
    """A rank. ping: the one that is not answered; None = all are. since: when it was sent, in
    seconds of the monotonic clock."""

    actor: Any
    node: str
    pid: int
    ping: Future[Any] | None = None
    since: float = 0.0


class Watch:
    """A thread that pings every rank until one of them dies. death: the first one; None = all live.

    wake: is called after that in the thread, to end the others and to wake whoever waits for
    them."""

    def __init__(self, ranks: Sequence[Watched], wake: Callable[[], None]) -> None:
        self.death: WorkerDeath | None = None
        self._ranks = ranks
        self._wake = wake
        self._on_death: Callable[[WorkerDeath], None] | None = None
        self._lock = threading.Lock()
        self._is_known = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pegboard-ranks", daemon=True)
        self._thread.start()

    def tell(self, on_death: Callable[[WorkerDeath], None]) -> None:
        """Call `on_death` once, when a rank dies or if one has died."""
        with self._lock:
            death = self.death
            if death is None:
                self._on_death = on_death
        if death is not None:
            on_death(death)

    def reason(self, timeout_s: float) -> WorkerDeath | None:
        """Return the death, which is noticed within `timeout_s` seconds if there is one."""
        self._is_known.wait(timeout_s)
        return self.death

    def end(self) -> None:
        """Stop watching. Ranks that end from now on do not count as deaths."""
        self._is_over.set()
        # garbage collection may call this in that thread
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        death = None
        while death is None:
            if self._is_over.wait(LOOK_S):
                return
            death = self._look()
        with self._lock:
            self.death = death
            on_death = self._on_death
        self._is_known.set()
        self._wake()
        if on_death is not None:
            on_death(death)

    def _look(self) -> WorkerDeath | None:
        """Return a rank that has died."""
        for number, rank in enumerate(self._ranks):
            if reason := look_at(rank):
                return WorkerDeath(number, reason)
        return None


def look_at(rank: Watched) -> str:
    """Ping a rank, unless a ping is on its way. Return why it is dead, or ""."""
    if rank.ping is not None and rank.ping.done():
        error = rank.ping.exception()
        if error is not None:
            return reason_of(error)
        rank.ping = None
    if rank.ping is None:
        rank.ping = rank.actor.ping.remote().future()
        rank.since = time.monotonic()
        return ""
    return late_reason(rank) if time.monotonic() - rank.since > LATE_S else ""


def late_reason(rank: Watched) -> str:
    """Return why a rank that does not answer is dead, or "" if it is only busy."""
    try:
        if on_node(rank.node, is_stopped, rank.pid):
            return "it is stopped (SIGSTOP), and was killed"
    except RayError:
        return ""  # the ping will say what happened to the node
    return ""


def reason_of(error: BaseException) -> str:
    """Return why Ray says that an actor is dead, in one line. Of a process that has ended, Ray does
    not know how."""
    text = " ".join(str(error).split())
    if "End of file" in text:
        return "its process has ended: SIGKILL, a crash or an exit; its log may say more"
    return text.partition("The actor is dead because ")[2] or text
