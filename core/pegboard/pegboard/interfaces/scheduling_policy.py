"""Kind `scheduling_policy`: who goes first, who gives blocks back, how much one step may do. Runs in E, hot, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pegboard.interfaces.spec import Need, Spec

if TYPE_CHECKING:
    from pegboard.config.limits import Limits
    from pegboard.data.batch import StepTimes
    from pegboard.data.request import RequestView


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicySpec(Spec):
    """flags: "priority" = honours `request.priority` (without it a non-zero priority is refused with a 400)."""

    FLAGS = frozenset({"priority"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicyNeed(Need):
    pass


@dataclass(frozen=True, slots=True)
class SchedulingPolicySetup:
    limits: "Limits"


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What stands at the door: rows decoding, rows prefilling, requests waiting, fraction of KV blocks in use."""

    num_decodes: int
    num_prefills: int
    num_waiting: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class StepBudget:
    """max_tokens of the step, max_chunk tokens of one prefill in the step, max_prefills partial prefills in the step, of
    which max_long_prefills may be of long prompts."""

    max_tokens: int
    max_chunk: int
    max_prefills: int
    max_long_prefills: int


class SchedulingPolicy(Protocol):
    """Holds the waiting requests in order. Called from the engine's thread only; keeps views until `remove`."""

    def add(self, request: "RequestView") -> None:
        """The request waits now: just admitted, or preempted (its status says which; a preempted one goes first among its
        equals)."""

    def remove(self, request: "RequestView") -> None:
        """It waits no more: scheduled, aborted or finished. Must cost at most O(log n)."""

    def waiting(self) -> Iterator["RequestView"]:
        """Best first, lazily; the scheduler may skip one and take the next, and does not change the set while iterating."""

    def victim(self, running: Sequence["RequestView"], need: "RequestView") -> "RequestView | None":
        """Who of `running` (in admission order) gives its blocks back so that `need` can go on; may be `need` itself; None =
        nobody, `need` waits. Among equals choose the last admitted: the choice must let somebody finish."""

    def budget(self, load: StepLoad) -> StepBudget:
        """Called once at the start of each step."""

    def observe(self, load: StepLoad, times: "StepTimes") -> None:
        """Called once after each step with the measured times; learn speeds here."""
