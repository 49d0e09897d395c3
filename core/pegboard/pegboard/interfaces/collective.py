"""Kind `collective` (provisional): communication between the ranks of one parallel group. Absent when the group has one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pegboard.interfaces.spec import Need, Spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpec(Spec):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveNeed(Need):
    pass


@dataclass(frozen=True, slots=True)
class CollectiveSetup:
    """rank of size ranks; address: where they meet ("tcp://host:port")."""

    rank: int
    size: int
    address: str


class Collective(Protocol):
    """Called per layer (all_reduce, all_gather), so implementations bind buffers once."""

    def all_reduce(self, x: "Tensor") -> "Tensor":
        """Sum over ranks, in place."""

    def all_gather(self, x: "Tensor", dim: int) -> "Tensor":
        """Concatenate over ranks along `dim`."""

    def broadcast(self, x: "Tensor", source: int) -> "Tensor":
        """In place."""

    def barrier(self, timeout_s: float) -> None:
        """Raises TimeoutError naming the ranks that are missing, where known."""
