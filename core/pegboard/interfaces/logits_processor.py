"""Kind `logits_processor` (provisional): users' own changes to logits, a chain in configured order. Runs in A and W."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pegboard.interfaces.spec import Need, Spec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from pegboard.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorSpec(Spec):
    """flags: "argmax_invariant" (never changes the most likely token), "host_tokens" (reads each new token on the host)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorNeed(Need):
    pass


@dataclass(frozen=True, slots=True)
class LogitsProcessorSetup:
    vocab_size: int
    device: str
    max_num_seqs: int


class LogitsProcessor(Protocol):
    argmax_invariant: bool

    @staticmethod
    def validate(params: "SamplingParams") -> str | None:
        """Called in A: why this request's parameters (`extra_args`) are wrong, or None. A reason becomes a 400."""

    def update(self, added: "Sequence[tuple[int, SamplingParams, np.ndarray]]", removed: "np.ndarray") -> None:
        """Only when rows change. `added`: (row, params, token ids so far). Rows are stable: there are no moves."""

    def apply(self, logits: "Tensor", rows: "Tensor", depth: "Tensor") -> "Tensor":
        """[N, V] in place; rows[i] and depth[i] say whose logits row i is and after how many drafts."""
