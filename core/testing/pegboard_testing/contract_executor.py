"""Contract tests of the kind `executor`. A plugin's test file:

    class TestMyExecutor(ExecutorContract):
        def executor(self, setup: ExecutorSetup) -> Executor:
            return MyExecutor(None, setup)

The worker in these tests is `RecordingWorker`. Its answers contain its history, so the executor may
run it in any process. As core's own, it can be made in another process: `make_worker` can be
pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pegboard.data.batch import CSR, Batch, BlockDelta, StepOutput, TokenMasks
from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.executor import Executor, ExecutorSetup, Place, WorkerDeath, WorkerReady
from pegboard_testing.fake_model import fake_kv_spec

FAILS = 13
"""The number of the step in which a worker raises."""


def make_batch(step: int, *, needs_masks: bool = False) -> Batch:
    """Return a batch that is empty except for `step`."""
    none = np.zeros(0, np.int32)
    return Batch(
        step=step,
        rows=none,
        num_scheduled_tokens=none,
        num_computed_tokens=none,
        num_draft_tokens=none,
        samples=np.zeros(0, bool),
        new=[],
        removed_rows=none,
        new_blocks=BlockDelta.empty(),
        copy_blocks=np.zeros((0, 3), np.int32),
        needs_masks=needs_masks,
    )


def make_masks(value: int) -> TokenMasks:
    return TokenMasks(np.zeros(1, np.int32), np.zeros(1, np.int32), np.array([[value]], np.uint32))


class RecordingWorker:
    """A worker whose result of a step is [step, the steps before it …] and the mask that it got."""

    def __init__(self, place: Place) -> None:
        self.rank = place.rank
        self.steps: list[int] = []
        self.num_stops = 0

    def load(self) -> WorkerReady:
        return WorkerReady(self.rank, {0: fake_kv_spec()}, 1000 + self.rank)

    def run(self, batch: Batch, masks: Callable[[], TokenMasks] | None) -> Callable[[], StepOutput]:
        self.steps.append(batch.step)
        if batch.step == FAILS:
            raise ModelError("step 13 fails")
        mask = int(masks().bits[0, 0]) if masks is not None else -1
        output = StepOutput(
            step=batch.step, rows=np.array([mask], np.int32), token_ids=CSR.of([list(self.steps)])
        )
        return lambda: output

    def call(self, method: str, *args: object) -> object:
        if method == "fail":
            raise ConfigError(f"rank {self.rank} cannot do that")
        return (method, self.rank, *args)

    def stop(self) -> None:
        self.num_stops += 1


class DamagedWorker(RecordingWorker):
    """A worker that cannot load its weights."""

    def load(self) -> WorkerReady:
        raise ModelError("weights are damaged")


class ExecutorContract:
    """Every executor passes these. Override `executor`."""

    def executor(self, setup: ExecutorSetup) -> Executor:
        """Return a new executor that is not started."""
        raise AssertionError("override ExecutorContract.executor")

    @pytest.fixture
    def started(self) -> Any:
        """Yield an executor that is stopped after the test, as the engine does."""
        executor = self.executor(ExecutorSetup(RecordingWorker))
        executor.start()
        yield executor
        executor.stop()

    def history(self, output: StepOutput) -> list[int]:
        return output.token_ids.row(0).tolist()

    def mask(self, output: StepOutput) -> int:
        return int(output.rows[0])

    def test_start_reports_the_rank(self) -> None:
        executor = self.executor(ExecutorSetup(RecordingWorker))
        try:
            ready = executor.start()
            assert [(r.rank, r.kv_memory_bytes) for r in ready] == [(0, 1000)]
            assert all(r.kv_specs == {0: fake_kv_spec()} for r in ready)
        finally:
            executor.stop()

    def test_a_failed_start_raises_what_the_worker_raised(self) -> None:
        executor = self.executor(ExecutorSetup(DamagedWorker))
        with pytest.raises(ModelError, match="weights are damaged"):
            executor.start()
        executor.stop()

    def test_steps_run_in_the_order_of_submission(self, started: Executor) -> None:
        """Several steps may be in flight, and their results may be read in any order."""
        futures = {step: started.submit(make_batch(step)) for step in (1, 2, 3, 4)}
        outputs = {step: futures[step].result() for step in (3, 1, 4, 2)}
        assert {step: out.step for step, out in outputs.items()} == {1: 1, 2: 2, 3: 3, 4: 4}
        assert [self.history(outputs[step]) for step in (1, 2, 3, 4)] == [
            [1],
            [1, 2],
            [1, 2, 3],
            [1, 2, 3, 4],
        ]

    def test_a_result_can_be_had_again(self, started: Executor) -> None:
        future = started.submit(make_batch(1))
        first = future.result()
        assert future.result() is first
        assert self.history(started.submit(make_batch(2)).result()) == [1, 2], (
            "asking again must not run the step again"
        )

    def test_masks_reach_their_step_and_no_other(self, started: Executor) -> None:
        first = started.submit(make_batch(1, needs_masks=True))
        plain = started.submit(make_batch(2))
        second = started.submit(make_batch(3, needs_masks=True))
        started.provide_masks(1, make_masks(7))
        started.provide_masks(3, make_masks(9))
        assert [self.mask(future.result()) for future in (second, plain, first)] == [9, -1, 7]

    def test_masks_may_come_after_their_step(self, started: Executor) -> None:
        future = started.submit(make_batch(1, needs_masks=True))
        started.provide_masks(1, make_masks(5))
        assert self.mask(future.result()) == 5

    def test_an_error_belongs_to_its_step(self, started: Executor) -> None:
        """`result` raises the error of the step each time it is called. Other steps are not
        affected."""
        before, failing, after = (started.submit(make_batch(step)) for step in (1, FAILS, 14))
        assert self.history(after.result()) == [1, FAILS, 14]
        for _ in range(2):
            with pytest.raises(ModelError, match="step 13 fails"):
                failing.result()
        assert self.history(before.result()) == [1]

    def test_calls_reach_the_worker(self, started: Executor) -> None:
        assert started.call("warm_up") == [("warm_up", 0)]
        assert started.call("allocate", 4, "x") == [("allocate", 0, 4, "x")]

    def test_an_error_in_a_call_is_raised_and_the_executor_goes_on(self, started: Executor) -> None:
        with pytest.raises(ConfigError, match="cannot do that"):
            started.call("fail")
        assert self.history(started.submit(make_batch(1)).result()) == [1]

    def test_stop_may_come_again_and_at_any_time(self) -> None:
        """It may be stopped before the start, with steps in flight, and twice. An orderly stop does
        not count as a death."""
        deaths: list[WorkerDeath] = []
        never_started = self.executor(ExecutorSetup(RecordingWorker))
        never_started.stop()
        executor = self.executor(ExecutorSetup(RecordingWorker))
        executor.watch(deaths.append)
        executor.start()
        executor.submit(make_batch(1))
        executor.submit(make_batch(2, needs_masks=True))
        executor.stop()
        executor.stop()
        assert deaths == []
