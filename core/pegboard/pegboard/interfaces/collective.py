"""Kind `collective` (provisional): communication between the ranks of one parallel group. A group with one rank has no
collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpec(Spec):
    """Collectives declare only what every spec declares."""


class Collective(Protocol):
    """Called per layer, so implementations bind buffers once."""

    def all_reduce(self, x: "Tensor") -> "Tensor":
        """Sum over ranks, in place."""
