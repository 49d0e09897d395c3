"""Shortest first: short requests overtake long ones, until these have waited for a limited time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pegboard.interfaces.scheduling_policy import (
    RequestStatus,
    RequestView,
    SchedulingPolicySetup,
    StepBudget,
    StepLoad,
)

if TYPE_CHECKING:
    from pegboard.data.batch import StepTimes
    from pegboard_scheduling_policy_shortest.options import ShortestOptions


class ShortestPolicy:
    """Sorts the waiting requests once per step, which is fast enough for hundreds of them and keeps
    the code short."""

    def __init__(self, options: ShortestOptions, setup: SchedulingPolicySetup) -> None:
        self._max_wait_s = options.max_wait_s
        # by id(), because a request's completions share its request_id
        self._waiting: dict[int, RequestView] = {}
        limits = setup.limits
        chunk = min(limits.long_prefill_token_threshold, limits.max_num_batched_tokens)
        self._budget = StepBudget(
            limits.max_num_batched_tokens,
            chunk,
            limits.max_num_partial_prefills,
            limits.max_long_partial_prefills,
        )

    def add(self, request: RequestView) -> None:
        self._waiting[id(request)] = request

    def remove(self, request: RequestView) -> None:
        self._waiting.pop(id(request), None)

    def waiting(self) -> Iterator[RequestView]:
        due_s = time.time() - self._max_wait_s

        def place(request: RequestView) -> tuple[bool, float, bool]:
            is_due = request.arrival_s < due_s
            weight = request.arrival_s if is_due else request.num_tokens
            return (not is_due, weight, request.status is not RequestStatus.PREEMPTED)

        return iter(sorted(self._waiting.values(), key=place))

    def victim(self, running: Sequence[RequestView], need: RequestView) -> RequestView | None:
        """Return the request that was admitted last, so that the first one can always finish."""
        return running[-1] if running else None

    def budget(self, load: StepLoad) -> StepBudget:
        return self._budget

    def observe(self, load: StepLoad, times: StepTimes) -> None:
        """Do nothing, because the budget is fixed."""
