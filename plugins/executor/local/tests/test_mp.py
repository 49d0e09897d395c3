"""The executor that starts a process for each rank."""

from __future__ import annotations

from pegboard_executor_local.processes import ProcessExecutor

from pegboard.interfaces.executor import ExecutorSetup
from pegboard_testing.contract_executor import ExecutorContract


class TestOneRank(ExecutorContract):
    def executor(self, setup: ExecutorSetup) -> ProcessExecutor:
        return ProcessExecutor(None, setup)


class TestTwoRanks(TestOneRank):
    ranks = 2
