"""Kind `kv_connector` (provisional): moves KV blocks between engines or memory tiers. A connector
has two halves, one for the scheduler (E) and one for the worker (W)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from pegboard.data.batch import Batch, TransferReport
    from pegboard.interfaces.attention import KVGroup, KVPlan, KVView
    from pegboard.interfaces.platform import Copies
    from pegboard.interfaces.scheduling_policy import RequestView


STATES = "states"
"""The flag of a connector that also moves the states of layers (see `KVConnectorSetup`). Others are
refused with models that have states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConnectorSpec(Spec):
    """`implementation` is the scheduler half. worker: "module:Class" of the worker half.
    parameters: the names in a request's `kv_transfer_params` that it reads. A request with a name
    that no configured connector reads is refused. alone: why no other connector may be beside it;
    "" = others may be. flags: STATES."""

    FLAGS = frozenset({STATES})

    worker: str
    parameters: frozenset[str] = frozenset()
    alone: str = ""


class MemoryEvents(Protocol):
    """Tells routers what the memory of a connector holds."""

    def stored(self, request: "RequestView", group: int, indices: Sequence[int]) -> None:
        """Blocks of the request can be loaded from the next step on. indices: of full blocks in the
        group's table, ascending. States, and prompts that are more than tokens, are passed over."""

    def removed(self, group: int, block_hash: bytes) -> None:
        """A block can no longer be loaded."""


@dataclass(frozen=True, slots=True)
class KVConnectorSetup:
    """plan: the KV groups with their block sizes, the size of the blocks that are hashed, and the
    identity of their content. Block hashes depend on the identity, so equal hashes mean equal
    content in all engines. Data that is found in another way, for example by a request's id, must
    be stored with the identity and refused if it differs. rank: whose part of the keys and values
    this half moves. The hashes of all ranks are equal, so stored data needs the rank in its name.
    The scheduler half has rank 0. number: of this rank among all ranks of all engines of the
    server. expired: for each KV group, number of computed tokens → the
    entries of a block table that no later token reads. A prefix needs the other entries only. The
    worker half does not have it.

    A group of states (`State`) has no block for each `block_size` tokens. Entry 0 of its table is
    the request's state, which every step changes. Other prefixes begin at the states after
    multiples of `block_size` tokens. `expired` is about these: entry i is the state at the end of
    block i, with the chain's hash there as its name, and a prefix needs the last one only. It is
    saved by the plan of the step that goes on there, from entry 0, or from the block that
    `Batch.copy_blocks` copies to entry 0 of a new request. It is loaded to entry 0.

    copies: those of the platform, for the worker half; None = the KV memory is the host's.

    events: for the scheduler half of a connector whose memory only this engine reads: the name of
    the memory, as in vLLM's KV events ("CPU", …) → what it reports to. None = nobody asks.
    """

    plan: "KVPlan"
    rank: int = 0
    number: int = 0
    expired: "Sequence[Callable[[int], range]]" = ()
    copies: "Copies | None" = None
    events: "Callable[[str], MemoryEvents] | None" = None


@dataclass(frozen=True, slots=True)
class Match:
    """num_tokens: tokens beyond the local prefix that can be loaded. load: when. "in_step": within
    the step that computes the rest. "between_steps": before the request is scheduled; until then it
    has the status LOADING."""

    num_tokens: int
    load: Literal["in_step", "between_steps"] = "in_step"


@dataclass(frozen=True, slots=True)
class BlockView:
    """A request's block ids per KV group, in order."""

    block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Release:
    """later: the blocks stay pinned until a report names the request as saved. parameters: sent to
    the client."""

    later: bool = False
    parameters: Mapping[str, Any] | None = field(default=None)


class KVConnectorScheduler(Protocol):
    def match(self, request: "RequestView", num_local_tokens: int) -> Match | None:
        """Return the external prefix beyond the local one. None means "ask again later", and the
        request is skipped in this step."""

    def allocated(
        self, request: "RequestView", blocks: BlockView, num_external_tokens: int
    ) -> None:
        """Blocks are reserved for the request. Load the last `num_external_tokens` of its
        `num_computed_tokens` tokens. If it is 0, load nothing: another connector of the chain was
        chosen."""

    def plan(self, batch: "Batch") -> bytes:
        """Return this step's loads and saves for the worker half. Hot. A block that a request has
        given back since the last plan may be saved without a pin: see `KVConnectorWorker.save`."""

    def released(
        self,
        request: "RequestView",
        blocks: BlockView,
        why: Literal["finished", "aborted", "preempted"],
    ) -> Release:
        """The request gives its blocks back."""

    def update(self, reports: "Sequence[TransferReport]") -> None:
        """Take the reports of the last step, merged over all ranks."""

    def reset(self) -> None:
        """The prefix cache was reset."""


class KVConnectorWorker(Protocol):
    def register(self, views: "Mapping[int, KVView]", groups: "Sequence[KVGroup]") -> None:
        """Hand over the KV memory. Called again after a resize."""

    def save(self, plan: bytes) -> None:
        """Read the blocks that this plan saves, before the step changes any block. Blocks that were
        given back since the last plan still have their content. This is not so later in the step:
        another request may own them."""

    def begin(self, plan: bytes) -> None:
        """Start loads before the forward. Loads of "in_step" must also be finished."""

    def end(self) -> "TransferReport":
        """Return a report after the forward. Also called in steps without tokens. The engine makes
        such steps as long as transfers are open and nothing else can run, so `end` may wait some
        milliseconds for a transfer then."""

    def close(self) -> None: ...
