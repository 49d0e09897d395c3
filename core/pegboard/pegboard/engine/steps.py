"""The steps that have been submitted to the executor and not yet applied."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from pegboard.config.limits import Limits
from pegboard.data.batch import Batch, StepOutput
from pegboard.engine.gates import Gate
from pegboard.engine.grammar.grammars import Grammars
from pegboard.engine.life import Life
from pegboard.engine.live_requests import LiveRequests
from pegboard.engine.lockstep import Alone
from pegboard.engine.metrics.step import StepMetrics
from pegboard.engine.scheduler import Scheduler
from pegboard.errors import expect
from pegboard.interfaces.executor import Executor, StepFuture


class Steps:
    """Submits steps, and applies their results in the same order."""

    def __init__(
        self,
        limits: Limits,
        executor: Executor,
        scheduler: Scheduler,
        live: LiveRequests,
        gates: Sequence[Gate],
        grammars: Grammars,
        metrics: StepMetrics,
        life: Life,
        lockstep: Alone,
    ) -> None:
        self._lockstep = lockstep
        self._most = limits.max_in_flight
        self._executor = executor
        self._scheduler = scheduler
        self._live = live
        self._gates = gates
        self._grammars = grammars
        self._metrics = metrics
        self._life = life
        self._in_flight: deque[tuple[Batch, StepFuture]] = deque()

    def __len__(self) -> int:
        return len(self._in_flight)

    def submit_all(self) -> None:
        """Submit steps while there is something to compute and room in flight."""
        most = 1 if any(gate.must_drain for gate in self._gates) else self._most
        while len(self) < most and (batch := self._schedule()):
            future = expect(self._executor.submit(batch), StepFuture, self._executor, "submit")
            self._in_flight.append((batch, future))

    def finish_oldest(self) -> None:
        """Wait for the oldest step and apply its result."""
        batch, future = self._in_flight.popleft()
        if batch.needs_masks:
            self._send_masks(batch)
        with self._metrics.timed("execute"):
            output = expect(future.result(), StepOutput, self._executor, "submit().result")
        self._lockstep.end_step(output)
        with self._metrics.timed("apply"):
            self._scheduler.update(batch, output)

    def finish_all(self) -> None:
        """Apply the results of all steps. They may wait for masks, which only this thread sends."""
        with self._life.changing():
            while self._in_flight:
                self.finish_oldest()

    def _schedule(self) -> Batch | None:
        with self._metrics.timed("schedule"):
            batch = self._scheduler.schedule(is_needed=self._lockstep.is_running)
        if batch is not None:
            batch.wave = self._lockstep.says(bool(self._live) and not self._scheduler.is_paused)
        return batch

    def _send_masks(self, batch: Batch) -> None:
        """Send the token masks of the oldest step. All earlier steps have been applied, so the
        grammars are up to date. The forward of the step runs at the same time."""
        live = self._live.rows.live(batch.rows.tolist())
        started = time.perf_counter()
        masks = self._grammars.masks(batch, live, self._scheduler.drafts(batch.step))
        self._metrics.spent("structured_output", time.perf_counter() - started)
        self._executor.provide_masks(batch.step, masks)
