"""Kind `logits_processor` (provisional): users' own changes to logits, a chain in configured order. Runs in A and W."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from pegboard.config.limits import Limits
    from pegboard.data.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorSpec(Spec):
    """validate: "module:function", called in A for every request with its SamplingParams: why its `extra_args` are wrong, which
    becomes the request's error, or None. Its module must not import torch; a `validate` of None takes all requests.
    flags: "host_tokens" (reads each new token on the host, which makes the engine synchronous)."""

    validate: str | None = None

    FLAGS = frozenset({"host_tokens"})


@dataclass(frozen=True, slots=True)
class LogitsProcessorSetup:
    limits: "Limits"
    device: str


class LogitsProcessor(Protocol):
    """One per rank. argmax_invariant: never changes the most likely token. host_tokens: as the spec's flag."""

    argmax_invariant: bool
    host_tokens: bool = False

    def update(self, added: "Sequence[tuple[int, SamplingParams, np.ndarray]]", removed: "np.ndarray") -> None:
        """Before `apply`, only when rows have changed; `removed` happened first. `added`: (row, params, token ids so far: the
        prompt and, for a resumed request, its outputs). Rows are stable: there are no moves."""

    def apply(self, logits: "Tensor", rows: "Tensor", depth: "Tensor") -> "Tensor":
        """[N, V] in place; rows[i] and depth[i] say whose logits row i is and after how many drafts."""

    def extend(self, rows: "np.ndarray", token_ids: "Sequence[Sequence[int]]") -> None:
        """Only with `host_tokens`, after each step: the tokens that each of `rows` [B] has got, accepted drafts included."""
