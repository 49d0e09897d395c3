"""Kind `collective` (provisional): how the ranks of a model exchange tensors. Runs in W."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pegboard.interfaces.spec import BATCH_INVARIANT, Need, Spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpec(Spec):
    """supports: `hosts` (AtMost(1) if all ranks must be on one host). flags: "batch_invariant", see
    `spec.BATCH_INVARIANT`."""

    FLAGS = frozenset({BATCH_INVARIANT})


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveNeed(Need):
    hosts: int | None = None


@dataclass(frozen=True, slots=True)
class CollectiveSetup:
    """The ranks of one group. group: its name, such as "tensor". ranks: the global ranks of the
    members, in the order of the group. rank: of this member in the group. address: see `Place`.
    device: torch name. timeout_s: how long a member waits for the others."""

    group: str
    ranks: tuple[int, ...]
    rank: int
    address: str
    device: str
    timeout_s: float


class Collective(Protocol):
    """One group of ranks. The constructor waits for all of them. All members call the same methods
    with tensors of the same shapes, in the same order, and all of them get the same bits. A call
    that waits longer than `timeout_s` raises EngineDeadError, which names the group, the call and
    the ranks that did not come. Hot."""

    def all_reduce(self, x: "Tensor") -> "Tensor":
        """Return the sum over the ranks of x [T, …], which may be written to x. x: float32,
        bfloat16 or float16."""

    def all_gather(self, x: "Tensor") -> "Tensor":
        """Return the tensors x [T, n] of all ranks side by side, in the order of the ranks: [T,
        ranks · n]."""

    def broadcast(self, x: "Tensor", source: int) -> "Tensor":
        """Return the tensor x [T, …] of the member `source`, by its place in the group. The others
        give tensors of the same shape and dtype, which may be written. A source may return before
        the others have come."""

    def close(self) -> None:
        """Leave the group. Nothing of it remains. Later calls do nothing."""
