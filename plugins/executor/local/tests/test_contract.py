"""The executors keep the contracts of their kind and of all plugins."""

from __future__ import annotations

import pytest
from pegboard_executor_local.in_process import InProcessExecutor

from pegboard.interfaces.executor import ExecutorSetup
from pegboard.testing.contract_executor import ExecutorContract, RecordingWorker, make_batch
from pegboard.testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("executor", "in_process"))


class TestInProcess(ExecutorContract):
    def executor(self, setup: ExecutorSetup) -> InProcessExecutor:
        return InProcessExecutor(None, setup)


def test_a_step_runs_only_when_its_result_is_asked_for() -> None:
    executor = InProcessExecutor(None, ExecutorSetup(1, RecordingWorker, None))
    executor.start()
    first, second = executor.submit(make_batch(1)), executor.submit(make_batch(2))
    assert executor.worker.steps == [] and not first.done()
    second.result()
    assert first.done()


def test_masks_that_never_came_are_our_own_mistake() -> None:
    executor = InProcessExecutor(None, ExecutorSetup(1, RecordingWorker, None))
    with pytest.raises(AssertionError, match="masks are provided before"):
        executor.submit(make_batch(1, needs_masks=True)).result()
