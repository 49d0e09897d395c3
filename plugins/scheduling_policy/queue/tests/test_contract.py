"""Both policies pass the contract of their kind and the generic contract."""

from __future__ import annotations

import pytest
from pegboard_scheduling_policy_queue.fcfs import FCFSPolicy
from pegboard_scheduling_policy_queue.plugin import FCFS, PRIORITY
from pegboard_scheduling_policy_queue.priority import PriorityPolicy

from pegboard.interfaces.scheduling_policy import SchedulingPolicySetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_scheduling_policy import SchedulingPolicyContract


@pytest.mark.parametrize("name", ["fcfs", "priority"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("scheduling_policy", name))


class TestFCFS(SchedulingPolicyContract):
    spec = FCFS

    def policy(self, setup: SchedulingPolicySetup) -> FCFSPolicy:
        return FCFSPolicy(None, setup)


class TestPriority(SchedulingPolicyContract):
    spec = PRIORITY

    def policy(self, setup: SchedulingPolicySetup) -> PriorityPolicy:
        return PriorityPolicy(None, setup)
