"""The request with the lowest `priority` value comes first, then the one that arrived earliest. The
victim is the last request in the same order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count
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

_MIN_COMPACT = 64


class _Entry:
    """A place in the heap. `request` is None after it was removed (lazy deletion)."""

    __slots__ = ("order", "request")

    def __init__(self, order: tuple[object, ...], request: RequestView) -> None:
        self.order = order
        self.request: RequestView | None = request

    def __lt__(self, other: _Entry) -> bool:
        return self.order < other.order


class PriorityPolicy:
    """A binary heap with lazy deletion. Add and remove cost O(log n) amortized. Reading the first k
    waiting requests costs O(k log k)."""

    def __init__(self, options: None, setup: SchedulingPolicySetup) -> None:
        self._heap: list[_Entry] = []
        self._entries: dict[int, _Entry] = {}
        self._added = count()
        self._budget = fixed_budget(setup)

    def add(self, request: RequestView) -> None:
        key = id(request)
        assert key not in self._entries, f"{request!r} waits already"
        is_fresh = request.status is not RequestStatus.PREEMPTED
        order = (
            request.priority,
            request.arrival_s,
            is_fresh,
            request.request_id,
            request.index,
            next(self._added),
        )
        entry = self._entries[key] = _Entry(order, request)
        heapq.heappush(self._heap, entry)

    def remove(self, request: RequestView) -> None:
        """Remove a request. Does nothing when the request is not waiting."""
        entry = self._entries.pop(id(request), None)
        if entry is None:
            return
        entry.request = None
        while self._heap and self._heap[0].request is None:
            heapq.heappop(self._heap)
        if len(self._heap) > max(_MIN_COMPACT, 2 * len(self._entries)):
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def waiting(self) -> Iterator[RequestView]:
        """Traverses the heap from the best entry without changing it: the children of a visited
        entry become candidates."""
        heap = self._heap
        candidates = [(heap[0], 0)] if heap else []
        while candidates:
            entry, index = heapq.heappop(candidates)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(candidates, (heap[child], child))
            if entry.request is not None:
                yield entry.request

    def victim(self, running: Sequence[RequestView], need: RequestView) -> RequestView | None:
        """Returns the worst of `running`. This can be `need` itself, which then waits for better
        requests. Among equals, the one admitted last is chosen, because the first must be able to
        finish."""
        return max(
            reversed(running),
            key=lambda request: (request.priority, request.arrival_s),
            default=None,
        )

    def budget(self, load: StepLoad) -> StepBudget:
        return self._budget

    def observe(self, load: StepLoad, times: StepTimes) -> None:
        """Does nothing, because the budget is fixed."""
