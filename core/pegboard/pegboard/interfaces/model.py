"""Kind `model`: an architecture, built from `pegboard.layers`. Keyed by the Hugging Face architecture name; the one wildcard
name `*` takes any architecture and ranks after every exact name. Runs in W."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(Spec):
    """Entry-point name: an architecture, as a checkpoint writes it."""


class Model(Protocol):
    """One architecture family in one file: a `torch.nn.Module` built as `Model(config, build)`.

    The constructor declares layers through `build` and allocates no weights. Layers ask for their checkpoint tensors by path:
    a layer built at `build.at("model").at("layers").at(3)…` reads `model.layers.3.….weight`.
    WEIGHTS gives exceptions to that rule: checkpoint prefixes to rewrite ({"old.": "new."}) before the index is searched.
    """

    WEIGHTS: ClassVar[Mapping[str, str]]

    def __init__(self, config: Mapping[str, Any], build: Any) -> None:
        """config: the checkpoint's, in Hugging Face's form. build: a `pegboard.layers.Build`."""

    def embed(self, input_ids: "Tensor") -> "Tensor":
        """[T] ids → [T, hidden]; first stage only."""

    def forward(self, hidden: "Tensor", positions: "Tensor") -> "Tensor":
        """[T, hidden], [T] → [T, hidden]: this stage's layers, and the final norm on the last stage. Recorded and replayed
        as a whole; no host synchronisation, no data-dependent Python."""

    def logits(self, hidden: "Tensor") -> "Tensor":
        """[N, hidden] → [N, V] float32 logits, for the rows that need them; last stage only."""
