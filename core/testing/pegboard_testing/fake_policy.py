"""The reference scheduling policy, first come first served or by priority, in the simplest correct
code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pegboard.data.batch import StepTimes
from pegboard.interfaces.scheduling_policy import (
    RequestStatus,
    RequestView,
    SchedulingPolicySetup,
    StepBudget,
    StepLoad,
)


class FakePolicy:
    """by_priority: the lowest `priority` is first, then the earliest arrival, and the victim is the
    worst of all. Otherwise the order is that of `add`, with preempted requests first, and the
    victim is the last one admitted. loads: every StepLoad that it got."""

    def __init__(self, setup: SchedulingPolicySetup, *, by_priority: bool = False) -> None:
        self._limits = setup.limits
        self._by_priority = by_priority
        self._waiting: list[RequestView] = []
        self.loads: list[StepLoad] = []

    def add(self, request: RequestView) -> None:
        if request.status is RequestStatus.PREEMPTED:
            self._waiting.insert(0, request)
        else:
            self._waiting.append(request)
        if self._by_priority:
            self._waiting.sort(key=lambda waiting: (waiting.priority, waiting.arrival_s))

    def remove(self, request: RequestView) -> None:
        self._waiting.remove(request)

    def waiting(self) -> Iterator[RequestView]:
        yield from self._waiting

    def victim(self, running: Sequence[RequestView], need: RequestView) -> RequestView | None:
        """Return the worst request in the order above; among equals, the last one admitted. The
        first one must be able to finish. Otherwise two completions of one request could take each
        other's blocks forever."""
        if not self._by_priority:
            return running[-1]
        places = range(len(running))
        return running[
            max(
                places, key=lambda place: (running[place].priority, running[place].arrival_s, place)
            )
        ]

    def budget(self, load: StepLoad) -> StepBudget:
        limits = self._limits
        chunk = min(limits.long_prefill_token_threshold, limits.max_num_batched_tokens)
        return StepBudget(
            limits.max_num_batched_tokens,
            chunk,
            limits.max_num_partial_prefills,
            limits.max_long_partial_prefills,
        )

    def observe(self, load: StepLoad, times: StepTimes) -> None:
        self.loads.append(load)
