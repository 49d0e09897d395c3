"""Loads between steps: threads copy blocks, and steps report which are done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait

from pegboard.data.batch import TransferReport
from pegboard_kv.plan import TransferPlan

IDLE_WAIT_S = 0.005
"""How long a step without tokens waits for a load."""


class Loads:
    """The loads that have begun, by request key."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._running: dict[str, Future[int | None]] = {}

    def begin(self, key: str, load: Callable[..., int | None], *arguments: object) -> None:
        """Let a thread call `load`, which returns the first token that is missing, or None."""
        self._running[key] = self._threads.submit(load, *arguments)

    def report(self, plan: TransferPlan) -> TransferReport:
        """Return what is done at the end of the plan's step."""
        if plan.is_idle and self._running:
            wait(self._running.values(), IDLE_WAIT_S, FIRST_COMPLETED)
        report = TransferReport(saved=plan.released, loaded=[], failed={})
        for key in [key for key, load in self._running.items() if load.done()]:
            first_bad = self._running.pop(key).result()
            if first_bad is None:
                report.loaded.append(key)
            else:
                report.failed[key] = first_bad
        return report
