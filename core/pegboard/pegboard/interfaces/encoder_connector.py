"""Kind `encoder_connector` (provisional): moves encoded media between engines. Scheduler half in E, worker half in W."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConnectorSpec(Spec):
    """`implementation` is the scheduler half; `worker` the worker half."""

    worker: str


@dataclass(frozen=True, slots=True)
class EncoderConnectorSetup:
    model_digest: str


class EncoderConnectorScheduler(Protocol):
    def has(self, media_hashes: Sequence[str]) -> list[bool]:
        """Which items another engine has already encoded."""


class EncoderConnectorWorker(Protocol):
    def load(self, media_hash: str) -> "Tensor | None":
        """The encoded item [num_tokens, hidden], None when it is gone."""

    def save(self, media_hash: str, encoded: "Tensor") -> None:
        """Publish an item this engine encoded."""
