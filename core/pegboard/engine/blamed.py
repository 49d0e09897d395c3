"""Plugins as the engine calls them: whatever escapes becomes `PluginFailure` with the plugin's name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pegboard.errors import blame
from pegboard.interfaces.scheduling_policy import SchedulingPolicy, StepBudget, StepLoad

if TYPE_CHECKING:
    from pegboard.batch import StepTimes
    from pegboard.request import RequestView


class BlamedPolicy:
    """A scheduling policy whose exceptions carry its name. Same methods, same meaning."""

    def __init__(self, policy: SchedulingPolicy, name: str) -> None:
        self._policy = policy
        self._name = name

    def add(self, request: RequestView) -> None:
        with blame(self._name):
            self._policy.add(request)

    def remove(self, request: RequestView) -> None:
        with blame(self._name):
            self._policy.remove(request)

    def waiting(self) -> Iterator[RequestView]:
        with blame(self._name):
            yield from self._policy.waiting()

    def victim(self, running: Sequence[RequestView], need: RequestView) -> RequestView | None:
        with blame(self._name):
            return self._policy.victim(running, need)

    def budget(self, load: StepLoad) -> StepBudget:
        with blame(self._name):
            return self._policy.budget(load)

    def observe(self, load: StepLoad, times: StepTimes) -> None:
        with blame(self._name):
            self._policy.observe(load, times)
