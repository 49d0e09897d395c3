"""Kind `draft` (provisional): proposes tokens that the model then verifies in one step (speculative decoding). Runs in W."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import Need, Spec

if TYPE_CHECKING:
    import numpy as np

    from pegboard.config.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec(Spec):
    """supports: `max_drafts` (AtMost). flags: "host_tokens" (reads each new token on the host, which makes the engine
    synchronous)."""

    FLAGS = frozenset({"host_tokens"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNeed(Need):
    max_drafts: int | None = None


@dataclass(frozen=True, slots=True)
class DraftSetup:
    limits: "Limits"
    target: Any = None


@dataclass(slots=True)
class DraftStep:
    """rows: [B] that may draft. history: token ids per row, as host arrays. max_drafts: [B] limit per row."""

    rows: "np.ndarray"
    history: "list[np.ndarray]"
    max_drafts: "np.ndarray"


@dataclass(slots=True)
class Drafts:
    """token_ids: per row, at most max_drafts[i] proposals (none is fine)."""

    token_ids: "list[np.ndarray]"


class DraftProposer(Protocol):
    def add(self, row: int, token_ids: "np.ndarray") -> None:
        """A row starts or resumes."""

    def remove(self, rows: "np.ndarray") -> None:
        """Rows are free."""

    def propose(self, step: DraftStep) -> Drafts:
        """End of a step, hot."""
