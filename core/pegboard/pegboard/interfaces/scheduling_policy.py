"""Kind `scheduling_policy`: which request goes first, which one gives its blocks back, and how much
one step may do. Runs in E, hot, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from pegboard.config.limits import Limits
    from pegboard.data.batch import StepTimes
    from pegboard.data.request import LoRARequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicySpec(Spec):
    """flags: "priority" = the policy honors `request.priority`. Without it, a request with a
    priority other than 0 is refused with status 400."""

    FLAGS = frozenset({"priority"})


@dataclass(frozen=True, slots=True)
class SchedulingPolicySetup:
    limits: Limits


class RequestStatus(Enum):
    """The state of a request. WAITING includes waiting for a grammar or for the prefill of a
    parent."""

    WAITING = "waiting"
    LOADING = "loading"  # holds blocks that a KV connector is filling; never a victim
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class RequestView(Protocol):
    """A completion as policies and KV connectors see it. They do not change it. key: its unique
    name in the engine. block_hashes: names of its blocks. Blocks with equal history have equal
    names on every host."""

    request_id: str
    index: int
    status: RequestStatus
    priority: int
    arrival_s: float
    num_computed_tokens: int
    num_preemptions: int
    lora: LoRARequest | None
    key: str
    all_token_ids: list[int]
    block_hashes: list[bytes]
    kv_transfer_params: dict[str, Any] | None

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens and confirmed output tokens."""

    @property
    def num_confirmed_tokens(self) -> int:
        """Number of tokens whose KV can no longer be changed by a step in flight."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The load before a step: numbers of decoding rows and waiting requests."""

    num_decodes: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Limits of a step. max_tokens: tokens in all; more than max_num_batched_tokens are not
    computed. max_chunk: tokens of one prefill. max_prefills: partial prefills. max_long_prefills:
    partial prefills of long prompts among them."""

    max_tokens: int
    max_chunk: int
    max_prefills: int
    max_long_prefills: int


class SchedulingPolicy(Protocol):
    """Holds the waiting requests in order. Called only from the engine's thread. It may keep views
    until `remove`."""

    def add(self, request: RequestView) -> None:
        """Add a waiting request. Its status says whether it is new or preempted. A preempted
        request goes before others of the same rank."""

    def remove(self, request: RequestView) -> None:
        """Remove a request that no longer waits, because it was scheduled, aborted or finished.
        Must take at most O(log n)."""

    def waiting(self) -> Iterator[RequestView]:
        """Yield the waiting requests lazily, best first. The scheduler may skip one and take the
        next. It does not change the set while it iterates."""

    def victim(self, running: Sequence[RequestView], need: RequestView) -> RequestView | None:
        """Return which of `running` (in admission order) gives its blocks back so that `need` can
        continue. This may be `need` itself. None means that no request does, and `need` waits.
        Among equal requests choose the last admitted one: then some request always finishes."""

    def budget(self, load: StepLoad) -> StepBudget:
        """Return the limits of the next step. Called once, at the start of each step."""

    def observe(self, load: StepLoad, times: StepTimes) -> None:
        """Take the measured times of a step. Called once after each step. A policy that adapts to
        speeds learns them here."""
