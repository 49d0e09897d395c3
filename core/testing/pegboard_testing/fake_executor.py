"""An executor with one FakeWorker. It computes as late as possible, so that several steps are
really in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from pegboard.data.batch import Batch, StepOutput, TokenMasks
from pegboard.interfaces.executor import ENGINE_CALLS, WorkerDeath, WorkerReady
from pegboard_testing.fake_worker import FakeWorker


class FakeFuture:
    """The result of a step. Computing it also computes all earlier steps."""

    def __init__(self, executor: FakeExecutor, step: int) -> None:
        self._executor = executor
        self._step = step

    def result(self) -> StepOutput:
        return self._executor.compute(self._step)


class FakeExecutor:
    """batches: all submitted batches, in order. calls: control calls as (method, args). on_submit:
    called with each batch."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.batches: list[Batch] = []
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.outputs: dict[int, StepOutput] = {}
        self.is_stopped = False
        self.on_submit: Callable[[Batch], None] = lambda batch: None
        self.max_in_flight = 0
        self._queue: deque[Batch] = deque()
        self._masks: dict[int, TokenMasks] = {}
        self._on_death: Callable[[WorkerDeath], None] = lambda death: None

    def start(self) -> list[WorkerReady]:
        specs = {layer: group.spec for group in self.worker.plan.groups for layer in group.layers}
        return [WorkerReady(0, specs, self.worker.plan.num_blocks * self.worker.plan.block_bytes)]

    def submit(self, batch: Batch) -> FakeFuture:
        self.on_submit(batch)
        self.batches.append(batch)
        self._queue.append(batch)
        self.max_in_flight = max(self.max_in_flight, len(self._queue))
        return FakeFuture(self, batch.step)

    def provide_masks(self, step: int, masks: TokenMasks) -> None:
        self._masks[step] = masks

    def call(self, method: str, *args: object) -> list[object]:
        assert method not in ENGINE_CALLS or not self._queue, f"{method} while steps are in flight"
        self.calls.append((method, args))
        return [self.worker.call(method, *args)]

    def watch(self, on_death: Callable[[WorkerDeath], None]) -> None:
        self._on_death = on_death

    def die(self, reason: str) -> None:
        """Pretend that the worker has died between steps."""
        self._on_death(WorkerDeath(0, reason))

    def stop(self) -> None:
        self.is_stopped = True

    def compute(self, step: int) -> StepOutput:
        """Run all steps up to this one and return its result."""
        while step not in self.outputs:
            batch = self._queue.popleft()
            if batch.needs_masks:
                assert batch.step in self._masks, (
                    "the masks of a step must be sent before its result is requested"
                )
                self.outputs[batch.step] = self.worker.run(
                    batch, partial(self._masks.pop, batch.step)
                )()
            else:
                self.outputs[batch.step] = self.worker.run(batch, None)()
        return self.outputs.pop(step)
