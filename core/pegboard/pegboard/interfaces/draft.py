"""Kind `draft` (provisional): proposes tokens that the model then verifies in one step (speculative
decoding). Runs in W."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pegboard.interfaces.spec import Need, Spec

if TYPE_CHECKING:
    import numpy as np

    from pegboard.config.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec(Spec):
    """supports: `max_drafts` (AtMost)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNeed(Need):
    max_drafts: int | None = None


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """is_adaptive: a proposer that is seldom right should propose less. fixed_tokens: see
    `Device.fixed_tokens`."""

    limits: "Limits"
    is_adaptive: bool = True
    fixed_tokens: float = 1.0


@dataclass(slots=True)
class DraftStep:
    """rows: [B], the rows that may draft: those that have a new token. history: one host array of
    token ids per row. max_drafts: [B], the limit of each row. num_verified: [B], how many drafts
    the step has verified. num_new: [B], how many tokens it has added to the history: the drafts
    that were right, and one more."""

    rows: "np.ndarray"
    history: "list[np.ndarray]"
    max_drafts: "np.ndarray"
    num_verified: "np.ndarray"
    num_new: "np.ndarray"


@dataclass(slots=True)
class Drafts:
    """token_ids: at most max_drafts[i] proposals for each row; an empty array is allowed."""

    token_ids: "list[np.ndarray]"


class DraftProposer(Protocol):
    def add(self, row: int, token_ids: "np.ndarray") -> None:
        """A request in this row starts or resumes. token_ids: the prompt and the outputs so far."""

    def remove(self, rows: "np.ndarray") -> None:
        """These rows are free now."""

    def propose(self, step: DraftStep) -> Drafts:
        """Return proposals for the next step. Called at the end of every step: hot."""
