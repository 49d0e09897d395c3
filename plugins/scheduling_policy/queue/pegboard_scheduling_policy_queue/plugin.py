"""Specs of the scheduling policies `fcfs` and `priority`."""

from __future__ import annotations

from pegboard.interfaces.scheduling_policy import SchedulingPolicySpec

FCFS = SchedulingPolicySpec(
    api="1.0",
    implementation="pegboard_scheduling_policy_queue.fcfs:FCFSPolicy",
)

PRIORITY = SchedulingPolicySpec(
    api="1.0",
    implementation="pegboard_scheduling_policy_queue.priority:PriorityPolicy",
    flags=frozenset({"priority"}),
)
