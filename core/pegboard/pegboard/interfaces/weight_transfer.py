"""Kind `weight_transfer` (provisional): how a running engine gets weights from a trainer in another
process. The setting `weight_transfer` names one. Runs in W."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransferSpec(Spec):
    """Entry-point name: what `weight_transfer` calls it. It has no fields of its own."""


@dataclass(frozen=True, slots=True)
class WeightTransferSetup:
    """device: torch name of the rank's device. rank: number of this rank among all ranks of all
    engines of the server. ranks: how many these are."""

    device: str
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor that the trainer sends. name: as in the checkpoint. dtype: torch name of its type,
    as "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightTransfer(Protocol):
    """Its calls come from one thread, between two steps. The engine waits for each, so all that
    waits for a trainer ends after some time."""

    def init(self, info: Mapping[str, Any]) -> None:
        """Connect to the trainer, again if it was connected. info: JSON values, from a client that
        is not trusted. Raises RequestError, whose parameter is "init_info", for values that are
        wrong, and ModelError if the trainer does not come."""

    def receive(
        self, tensors: Sequence[SentTensor], info: Mapping[str, Any]
    ) -> "Generator[Tensor, None, None]":
        """Yield these tensors, in this order, with these types and shapes, on any device. Nothing
        may change one after it was yielded. info: the other values of the update, JSON values from
        a client that is not trusted. Raises RequestError, whose parameter is "update_info", for
        values that are wrong, and ModelError if the trainer does not send everything. If the engine
        stops to read, the generator is closed, and the next call starts afresh."""

    def close(self) -> None:
        """Free everything. This is the last call."""
