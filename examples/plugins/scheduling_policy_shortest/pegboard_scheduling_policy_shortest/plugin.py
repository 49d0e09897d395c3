"""The spec of the scheduling policy `shortest`."""

from __future__ import annotations

from pegboard.interfaces.scheduling_policy import SchedulingPolicySpec

SHORTEST = SchedulingPolicySpec(
    api="1.0",
    implementation="pegboard_scheduling_policy_shortest.policy:ShortestPolicy",
    options="pegboard_scheduling_policy_shortest.options:ShortestOptions",
)
