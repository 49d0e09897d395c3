"""First come, first served. Preempted requests are placed at the front. The request admitted last
is the first victim."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pegboard.interfaces.scheduling_policy import (
    RequestStatus,
    RequestView,
    SchedulingPolicySetup,
    StepBudget,
    StepLoad,
)
from pegboard_scheduling_policy_queue.limits import fixed_budget

if TYPE_CHECKING:
    from pegboard.data.batch import StepTimes


class FCFSPolicy:
    """Waiting requests in order of `add`, in a linked hash map: every change costs O(1). The keys
    are object identities, because the completions of one request share its id.
    """

    def __init__(self, options: None, setup: SchedulingPolicySetup) -> None:
        self._queue: OrderedDict[int, RequestView] = OrderedDict()
        self._budget = fixed_budget(setup)

    def add(self, request: RequestView) -> None:
        key = id(request)
        assert key not in self._queue, f"{request!r} waits already"
        self._queue[key] = request
        if request.status is RequestStatus.PREEMPTED:
            self._queue.move_to_end(key, last=False)

    def remove(self, request: RequestView) -> None:
        """Remove a request. Does nothing when the request is not waiting."""
        self._queue.pop(id(request), None)

    def waiting(self) -> Iterator[RequestView]:
        return iter(self._queue.values())

    def victim(self, running: Sequence[RequestView], need: RequestView) -> RequestView | None:
        """Returns the request admitted last, because it loses the least work and has waited the
        shortest time."""
        return running[-1] if running else None

    def budget(self, load: StepLoad) -> StepBudget:
        return self._budget

    def observe(self, load: StepLoad, times: StepTimes) -> None:
        """Does nothing, because the budget is fixed."""
