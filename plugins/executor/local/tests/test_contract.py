"""The executors pass the contract of their kind and the generic contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pegboard_executor_local.in_process import InProcessExecutor
from pegboard_executor_local.launched import LaunchedExecutor

from pegboard.data.batch import Batch, StepOutput, TokenMasks
from pegboard.interfaces.executor import ExecutorSetup
from pegboard_testing.contract_executor import ExecutorContract, RecordingWorker, make_batch
from pegboard_testing.contract_generic import check_entry, installed_entry

LAUNCHED = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize("name", ["uni", "mp", "external_launcher"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("executor", name))


class TestInProcess(ExecutorContract):
    def executor(self, setup: ExecutorSetup) -> InProcessExecutor:
        return InProcessExecutor(None, setup)


class TestLaunched(ExecutorContract):
    @pytest.fixture(autouse=True)
    def alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in LAUNCHED.items():
            monkeypatch.setenv(name, value)

    def executor(self, setup: ExecutorSetup) -> LaunchedExecutor:
        return LaunchedExecutor(None, setup)


def test_a_step_submitted_alone_runs_where_its_result_is_asked_for() -> None:
    executor = InProcessExecutor(None, ExecutorSetup(RecordingWorker))
    executor.start()
    for number in (1, 2):
        step = executor.submit(make_batch(number))
        assert not step.ran.is_set()
        step.result()
    assert executor.thread is None and executor.worker.steps == [1, 2]


def test_steps_submitted_ahead_run_by_themselves() -> None:
    executor = InProcessExecutor(None, ExecutorSetup(RecordingWorker))
    executor.start()
    steps = [executor.submit(make_batch(number)) for number in (1, 2, 3)]
    assert all(step.ran.wait(30) for step in steps)
    assert executor.worker.steps == [1, 2, 3]
    executor.stop()
    assert executor.thread is None


def test_stopping_does_not_wait_for_masks() -> None:
    executor = InProcessExecutor(None, ExecutorSetup(RecordingWorker))
    executor.start()
    waiting = [executor.submit(make_batch(number, needs_masks=True)) for number in (1, 2)]
    executor.stop()
    assert all(step.ran.is_set() for step in waiting)


def test_masks_that_never_came_are_our_own_mistake() -> None:
    executor = InProcessExecutor(None, ExecutorSetup(RecordingWorker))
    with pytest.raises(AssertionError, match=r"provide_masks\(\) must be called before"):
        executor.submit(make_batch(1, needs_masks=True)).result()


def test_a_step_may_stop_its_executor() -> None:
    """stop() is called in the thread that runs the steps, as a finalizer does when garbage
    collection runs there."""

    class Forgetful(RecordingWorker):
        def run(self, batch: Batch, masks: Callable[[], TokenMasks] | None) -> StepOutput:
            if batch.step == 2:
                executor.stop()
            return super().run(batch, masks)

    executor = InProcessExecutor(None, ExecutorSetup(Forgetful))
    executor.start()
    steps = [executor.submit(make_batch(number)) for number in (1, 2, 3)]
    assert all(step.ran.wait(30) for step in steps)
    assert executor.worker.num_stops == 1 and [step.error for step in steps] == [None] * 3
