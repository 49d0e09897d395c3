"""Kind `scheduling_policy`: which request goes first, which gives blocks back, how much one step may do. Runs in E, hot, no
torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from pegboard.config.limits import Limits
    from pegboard.data.batch import StepTimes
    from pegboard.data.request import AdapterRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicySpec(Spec):
    """flags: "priority" = honours `request.priority` (without it a non-zero priority is refused with a 400)."""

    FLAGS = frozenset({"priority"})


@dataclass(frozen=True, slots=True)
class SchedulingPolicySetup:
    limits: Limits


class RequestStatus(Enum):
    """Where a request stands. WAITING includes waiting for a grammar or a parent's prefill."""

    WAITING = "waiting"
    LOADING = "loading"  # holds blocks while a KV connector fills them; never a victim
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class RequestView(Protocol):
    """What policies and KV connectors see of a completion; they do not change it. `key` is its unique name in the engine;
    `block_hashes` name its blocks, and equal history has equal names on every host."""

    request_id: str
    index: int
    status: RequestStatus
    priority: int
    arrival_s: float
    num_computed_tokens: int
    num_preemptions: int
    lora: AdapterRef | None
    key: str
    all_token_ids: list[int]
    block_hashes: list[bytes]
    kv_transfer_params: dict[str, Any] | None

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Prompt and confirmed outputs."""

    @property
    def num_confirmed_tokens(self) -> int:
        """Tokens whose KV no step in flight can change any more."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The load before a step: rows decoding, rows prefilling, requests waiting, fraction of KV blocks in use."""

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

    def add(self, request: RequestView) -> None:
        """The request waits now: just admitted, or preempted (its status says which; a preempted one goes first among its
        equals)."""

    def remove(self, request: RequestView) -> None:
        """It does not wait any more: scheduled, aborted or finished. Must cost at most O(log n)."""

    def waiting(self) -> Iterator[RequestView]:
        """Best first, lazily; the scheduler may skip one and take the next, and does not change the set while iterating."""

    def victim(self, running: Sequence[RequestView], need: RequestView) -> RequestView | None:
        """Which of `running` (in admission order) gives its blocks back so that `need` can go on. It may be `need` itself. None:
        no request does, and `need` waits. Among equals choose the last admitted, so that some request always finishes."""

    def budget(self, load: StepLoad) -> StepBudget:
        """Called once at the start of each step."""

    def observe(self, load: StepLoad, times: StepTimes) -> None:
        """Called once after each step with the measured times; learn speeds here."""
