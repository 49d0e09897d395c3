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
from pegboard_executors.deaths import FirstDeath

LOOK_S = 0.25
"""Seconds between two looks at the ranks."""

LATE_S = 0.75
"""A ping that takes longer is a reason to look at the process."""


@dataclass
class Watched:
    """A rank. life: the call that ends when its process does. ping: the one that is not answered;
    None = all are. since: when it was sent, in seconds of the monotonic clock."""

    actor: Any
    node: str
    pid: int
    life: Future[Any]
    ping: Future[Any] | None = None
    since: float = 0.0


class Watch(FirstDeath):
    """A thread that pings every rank until one of them dies.

    wake: is called after that in the thread, to end the others and to wake whoever waits for
    them."""

    def __init__(self, ranks: Sequence[Watched], wake: Callable[[], None]) -> None:
        super().__init__()
        self._ranks = ranks
        self._wake = wake
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pegboard-ranks", daemon=True)
        self._thread.start()

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
        self.announce(death, self._wake)

    def _look(self) -> WorkerDeath | None:
        """Return a rank that has died."""
        for reason_now in (end_of, late_reason):
            for number, rank in enumerate(self._ranks):
                if reason := reason_now(rank):
                    return WorkerDeath(number, reason)
        return None


def end_of(rank: Watched) -> str:
    """Return how the process of a rank has ended, or ""."""
    return reason_of(rank.life.exception()) if rank.life.done() else ""


def late_reason(rank: Watched) -> str:
    """Ping a rank, unless a ping is on its way. Return why one that does not answer is dead, or ""
    if it is only busy."""
    if rank.ping is None or rank.ping.done():
        rank.ping = rank.actor.ping.remote().future()
        rank.since = time.monotonic()
    if time.monotonic() - rank.since < LATE_S:
        return ""
    try:
        is_dead = on_node(rank.node, is_stopped, rank.pid)
    except RayError:
        return ""  # the node does not answer either, which ends the call `life`
    return "it is stopped (SIGSTOP), and was killed" if is_dead else ""


def reason_of(error: BaseException | None) -> str:
    """Return why Ray says that an actor is dead, in one line. Of a process that has ended, Ray does
    not know how."""
    text = " ".join(str(error).split())
    if "End of file" in text or "Socket closed" in text:
        return "its process or node has ended: SIGKILL, a crash or an exit; its log may say more"
    return text.partition("The actor is dead because ")[2] or text
