"""The scheduling policy as the engine calls it: whatever escapes becomes `PluginFailure` with the plugin's name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from pegboard.errors import blame
from pegboard.interfaces.scheduling_policy import SchedulingPolicy, StepBudget, StepLoad

if TYPE_CHECKING:
    from pegboard.data.batch import StepTimes
    from pegboard.data.request import Request


class BlamedPolicy:
    """A scheduling policy whose exceptions carry its name. Same methods, same meaning."""

    def __init__(self, policy: SchedulingPolicy, name: str) -> None:
        self._policy = policy
        self._name = name

    def add(self, request: Request) -> None:
        with blame(self._name):
            self._policy.add(request)

    def remove(self, request: Request) -> None:
        with blame(self._name):
            self._policy.remove(request)

    def waiting(self) -> Iterator[Request]:
        with blame(self._name):
            yield from cast("Iterator[Request]", self._policy.waiting())  # they are the ones it was given

    def victim(self, running: Sequence[Request], need: Request) -> Request | None:
        with blame(self._name):
            return cast("Request | None", self._policy.victim(running, need))

    def budget(self, load: StepLoad) -> StepBudget:
        with blame(self._name):
            return self._policy.budget(load)

    def observe(self, load: StepLoad, times: StepTimes) -> None:
        with blame(self._name):
            self._policy.observe(load, times)
