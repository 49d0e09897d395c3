"""Kind `sampler`: logits → token ids (W). Owns every SamplingParams field that touches logits, in the documented order.

Order (vLLM's): token masks → raw logprobs taken here → float32 → allowed_token_ids → bad_words → min_tokens, logit_bias and
custom processors that may change the argmax → penalties → greedy argmax where temperature is 0 → temperature → min_p and
argmax-invariant processors → top_k, top_p → sample by exponential race.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from pegboard.config.limits import Limits
    from pegboard.data.batch import Logprobs, TokenMasks
    from pegboard.data.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec(Spec):
    """Samplers declare only what every spec declares."""


@dataclass(frozen=True, slots=True)
class SamplerSetup:
    """seed: of the generator for requests without their own. processors: custom logits processors in chain order. kernels: chosen
    ops; "sample_tokens" (see `pegboard.ops.sampling`) when a plugin of the kind `kernel` provides it."""

    limits: "Limits"
    device: str
    seed: int
    logprobs_mode: Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"] = "raw_logprobs"
    processors: Sequence[Any] = field(default_factory=tuple)
    kernels: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


@dataclass(slots=True)
class SampleStep:
    """One step's sampling. Row i of `rows` has logits rows offsets[i] … offsets[i+1]-1: one per draft to verify, plus one.

    rows: int32 [B]. offsets: int32 [B+1]. draft_token_ids: int64 tensor [N − B] in row order, or None when nobody drafts.
    draft_probs: float32 [N − B, V] or None (a deterministic proposal). masks: grammar masks or None.
    """

    rows: "np.ndarray"
    offsets: "np.ndarray"
    draft_token_ids: "Tensor | None" = None
    draft_probs: "Tensor | None" = None
    masks: "TokenMasks | None" = None


@dataclass(slots=True)
class Sampled:
    """token_ids: int64 [B, 1 + max drafts], the first counts[i] valid; counts: int64 [B]. logprobs: per row, covering its
    accepted tokens, None where not asked; None as a whole when nobody asked."""

    token_ids: "Tensor"
    counts: "Tensor"
    logprobs: "list[Logprobs | None] | None" = None


class Sampler(Protocol):
    """One per rank. Keeps per-row state; hot methods do no per-row Python work for rows that use no special field."""

    def add(self, row: int, params: "SamplingParams", seed: int | None, token_ids: "np.ndarray", num_prompt_tokens: int) -> None:
        """`row` starts or resumes: token_ids [n] are the prompt and the outputs so far. A resumed request with a seed goes on
        with the random numbers it would have used."""

    def remove(self, rows: "np.ndarray") -> None:
        """These rows are free now; unknown rows are ignored."""

    def sample(self, logits: "Tensor", step: SampleStep) -> Sampled:
        """logits [N, V] float32, may be changed in place. Accepted tokens are added to the rows' own history."""

    def score(self, logits: "Tensor", targets: "Tensor", top: int) -> "Logprobs":
        """Prompt logprobs of one chunk: logits [n, V] → log-softmax of the targets [n] with rank, and the `top` best
        (−1 = all)."""
