"""The waiting requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from pegboard.data.batch import StepTimes
from pegboard.engine.requests import Request
from pegboard.errors import expect
from pegboard.interfaces.scheduling_policy import SchedulingPolicy, StepBudget, StepLoad


class WaitingQueue:
    """The scheduling policy, which orders the waiting requests, and the requests that are held back
    from it."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._num_waiting = 0
        self._held: list[Request] = []
        self._is_open = True

    def __len__(self) -> int:
        """How many requests wait, held ones included."""
        return self._num_waiting + len(self._held)

    def __iter__(self) -> Iterator[Request]:
        """In the policy's order, without held ones."""
        waiting = expect(self._policy.waiting(), Iterable, self._policy, "waiting")
        return iter(cast("Iterable[Request]", waiting))  # it returns the objects that it was given

    @property
    def held(self) -> Sequence[Request]:
        return self._held

    def arrive(self, request: Request) -> None:
        """Add a new request."""
        if self._is_open:
            self.add(request)
        else:
            self._held.append(request)

    def add(self, request: Request) -> None:
        """Add a request that was here before."""
        self._policy.add(request)
        self._num_waiting += 1

    def remove(self, request: Request) -> None:
        """Remove a request that was admitted or has ended."""
        if request in self._held:
            self._held.remove(request)
        else:
            self._policy.remove(request)
            self._num_waiting -= 1

    def close(self) -> None:
        """Hold the requests that arrive from now on."""
        self._is_open = False

    def open(self) -> None:
        """Let the policy order the held requests too."""
        self._is_open = True
        held = self._held
        self._held = []
        for request in held:
            self.add(request)

    # --- what else the policy decides -------------------------------------------------------------

    def budget(self, load: StepLoad) -> StepBudget:
        return expect(self._policy.budget(load), StepBudget, self._policy, "budget")

    def victim(self, running: Sequence[Request], request: Request) -> Request | None:
        """Return the running request that loses its blocks to `request`, or None."""
        victim = self._policy.victim(tuple(running), request)
        return expect(victim, Request | None, self._policy, "victim")

    def observe(self, load: StepLoad, times: StepTimes) -> None:
        self._policy.observe(load, times)
