"""Kind `kv_connector` (provisional): moves KV blocks between engines or memory tiers. Two halves: scheduler (E), worker (W)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from pegboard.data.batch import Batch, TransferReport
    from pegboard.interfaces.attention import KVGroup, KVView
    from pegboard.interfaces.scheduling_policy import RequestView


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConnectorSpec(Spec):
    """`implementation` is the scheduler half; `worker`: "module:Class" of the worker half."""

    worker: str


@dataclass(frozen=True, slots=True)
class KVConnectorSetup:
    """block_sizes: tokens per block of each KV group."""

    block_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """num_tokens beyond the local prefix can be loaded: inside the step that computes the rest ("in_step"), or before the
    request is scheduled ("between_steps", the request waits in status LOADING)."""

    num_tokens: int
    load: Literal["in_step", "between_steps"] = "in_step"


@dataclass(frozen=True, slots=True)
class BlockView:
    """A request's block ids per KV group, in order."""

    block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Release:
    """later=True: the blocks stay pinned until a report names the request as saved. parameters go to the client."""

    later: bool = False
    parameters: Mapping[str, Any] | None = field(default=None)


class KVConnectorScheduler(Protocol):
    def match(self, request: "RequestView", num_local_tokens: int) -> Match | None:
        """External prefix beyond the local one; None = ask again later (the request is skipped this step)."""

    def allocated(self, request: "RequestView", blocks: BlockView, num_external_tokens: int) -> None:
        """Blocks are reserved. 0 tokens = load nothing (another connector of the chain won)."""

    def plan(self, batch: "Batch") -> bytes:
        """This step's loads and saves for the worker half. Hot."""

    def released(self, request: "RequestView", blocks: BlockView, why: Literal["finished", "aborted", "preempted"]) -> Release:
        """The request gives its blocks back."""

    def update(self, reports: "Sequence[TransferReport]") -> None:
        """Reports of the last step, merged over ranks."""

    def reset(self) -> None:
        """The prefix cache was reset."""


class KVConnectorWorker(Protocol):
    def register(self, views: "Mapping[int, KVView]", groups: "Sequence[KVGroup]") -> None:
        """The KV memory; again after a resize."""

    def begin(self, plan: bytes) -> None:
        """Before the forward: start (and for "in_step" finish) loads."""

    def end(self) -> "TransferReport":
        """After the forward: save, report. Also called on steps without tokens."""

    def close(self) -> None: ...
