"""Kind `encoder_connector` (provisional): shares what models make of images, audio and video with
other engines, so that an item is encoded only once. Runs in W."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConnectorSpec(Spec):
    """It has no fields of its own."""


@dataclass(frozen=True, slots=True)
class EncoderConnectorSetup:
    """device: where `load` puts rows. rank: the ranks make the same rows; the first one saves
    them."""

    device: str
    rank: int = 0


class EncoderConnector(Protocol):
    """A name consists of hexadecimal digits. It stands for an item, how it was processed, and the
    weights and types that the rows depend on."""

    def load(self, name: str) -> "Tensor | None":
        """Return the rows [n, width] with this name, or None if they are not there. Called before a
        step that needs them; the model encodes the item if the rows are not there. Data that is
        damaged is not there."""

    def save(self, name: str, rows: "Tensor") -> None:
        """Keep rows [n, width], which may already be there. A failure must not raise: the answer
        does not depend on it."""

    def close(self) -> None:
        """Finish what was begun. This is the last call."""
