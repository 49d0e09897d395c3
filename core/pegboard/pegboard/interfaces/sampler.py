"""Kind `sampler`: logits → token ids (W). A sampler applies every SamplingParams field that
concerns logits, in the documented order.

The order is vLLM's: token masks → raw logprobs are taken → float32 → allowed_token_ids → bad_words
→ min_tokens, logit_bias and custom processors that may change the argmax → penalties → greedy
argmax where temperature is 0 → temperature → min_p and argmax-invariant processors → top_k, top_p →
sample by exponential race.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pegboard.interfaces.spec import BATCH_INVARIANT, Spec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from pegboard.config.limits import Limits
    from pegboard.data.batch import Logprobs, TokenMasks
    from pegboard.data.sampling_params import SamplingParams
    from pegboard.interfaces.platform import Copies


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec(Spec):
    """flags: "batch_invariant", see `spec.BATCH_INVARIANT`. It holds for greedy requests and for
    those with a seed."""

    FLAGS = frozenset({BATCH_INVARIANT})


@dataclass(frozen=True, slots=True)
class SamplerSetup:
    """seed: of the generator for requests without a seed. processors: custom logits processors in
    chain order. kernels: the chosen ops. They include "sample_tokens" (see `pegboard.ops.sampling`)
    if a plugin of the kind `kernel` provides it. copies: from and to a device with separate memory;
    None if there is none. A sampler that copies with them never waits."""

    limits: "Limits"
    device: str
    seed: int
    logprobs_mode: Literal[
        "raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"
    ] = "raw_logprobs"
    processors: Sequence[Any] = field(default_factory=tuple)
    kernels: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    copies: "Copies | None" = None


@dataclass(slots=True)
class SampleStep:
    """The sampling of one step. Row i of `rows` has the logits rows offsets[i] … offsets[i+1]-1:
    one for each draft to verify, plus one.

    rows: int32 [B]. offsets: int32 [B+1]. draft_token_ids: int64 tensor [N − B] in row order, None
    if no row has drafts. masks: grammar masks, if any. draft_probs: [N − B, V], with which each
    draft token was drawn; a row of zeros, or None = there was no chance in it.
    """

    rows: "np.ndarray"
    offsets: "np.ndarray"
    draft_token_ids: "Tensor | None" = None
    masks: "TokenMasks | None" = None
    draft_probs: "Tensor | None" = None


@dataclass(slots=True)
class Sampled:
    """token_ids: int64 [B, 1 + max drafts], of which the first counts[i] are valid. counts: int64
    [B]. logprobs: waits, and returns for each row those of its accepted tokens, or None if the row
    did not ask for them. The whole field is None if no row did."""

    token_ids: "Tensor"
    counts: "Tensor"
    logprobs: "Callable[[], list[Logprobs | None]] | None" = None

    def shown(self) -> "list[Logprobs | None] | None":
        """Wait for the logprobs."""
        return None if self.logprobs is None else self.logprobs()


class Sampler(Protocol):
    """One instance per rank, which keeps state per row. Hot methods run no Python code per row for
    rows that use no special field."""

    def add(
        self,
        row: int,
        params: "SamplingParams",
        seed: int | None,
        token_ids: "np.ndarray",
        num_prompt_tokens: int,
    ) -> None:
        """A request in `row` starts or resumes. token_ids [n]: the prompt and the outputs so far. A
        resumed request with a seed continues with the random numbers that it would have got without
        the interruption."""

    def remove(self, rows: "np.ndarray") -> None:
        """Free these rows. Unknown rows are ignored."""

    def sample(self, logits: "Tensor", step: SampleStep) -> Sampled:
        """Sample from logits [N, V] float32, which may be changed in place. Accepted tokens are
        added to the rows' history."""

    def score(self, logits: "Tensor", targets: "Tensor", top: int) -> "Logprobs":
        """Return prompt logprobs of one chunk: from logits [n, V], the log-softmax of the targets
        [n] with their ranks, and the `top` best tokens (−1 = all)."""


class DrawsDrafts(Protocol):
    """An addition to the Sampler: it draws drafts, and verifies those that were drawn."""

    def draw_drafts(self, logits: "Tensor", rows: "np.ndarray") -> "tuple[Tensor, Tensor | None]":
        """Draw a draft token for each of rows [B] from the logits [B, V] of a draft model, which
        may be changed in place. Returns the ids [B] and the probabilities [B, V] with which they
        were drawn. A row of zeros, or None for all: the most likely token was taken. So it is for
        greedy rows, and for rows with a seed, whose tokens must not depend on the drafts."""
