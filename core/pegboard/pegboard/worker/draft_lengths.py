"""How many drafts each row verifies in the next step.

A row has an estimate p of the probability that its next draft token is right. The k-th draft token
of a step is then accepted with probability p^k. It is worth its place if that is at least the
number of output tokens that the time for one more token would give elsewhere. In a batch of B rows
that number is C · B / (F + B), where F is the time of a step that does not depend on its tokens, in
tokens, and C the time of a draft token, in decoded tokens: the larger the batch, the better drafts
must be.

A row that verifies nothing still gets one proposal, which the host compares with the next token. So
its estimate rises as soon as the text repeats itself, and until then its steps are plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np

from pegboard.config.limits import Limits

FIRST_RATE = 0.5
WEIGHT = 0.3
"""The weight of the newest draft token in the estimate."""
DRAFT_COST = 0.6
"""C above, as measured on a CPU. It is below 1 because matrix products of more rows are faster."""
MIXED_COST = 0.75
MOST_MIXED_COST = 6.0
"""Extra cost of a step with drafts and several rows, in decoded tokens per row, and its maximum.
Such a step is not one token per row (0.5, at most 4, as measured on a CPU), and no step is
scheduled ahead."""
USUAL_WEIGHT = 0.01
"""The weight of a row's estimate in the estimate for new requests."""
LOWEST_RATE = 0.01
HIGHEST_RATE = 0.995


class DraftLengths:
    """The estimates of all rows. fixed_tokens: F above."""

    def __init__(self, limits: Limits, fixed_tokens: float) -> None:
        self._limits = limits
        self._fixed_tokens = fixed_tokens
        self._rates = [FIRST_RATE] * limits.max_num_seqs
        self._usual = FIRST_RATE
        self._next: list[int | None] = [None] * limits.max_num_seqs

    def add(self, row: int) -> None:
        """A request in this row starts or resumes. Its first estimate is what was usual in the last
        requests."""
        self._rates[row] = self._usual
        self._next[row] = None

    def ask(self, rows: Sequence[int]) -> list[int]:
        """Return how many drafts to propose for each row."""
        limits = self._limits
        if len(rows) > limits.max_draft_rows:
            return [0] * len(rows)
        if not limits.adaptive_drafts:
            return [limits.max_drafts] * len(rows)
        worth = log(self._worth(rows))
        return [max(1, min(limits.max_drafts, int(worth / log(self._rates[row])))) for row in rows]

    def _worth(self, rows: Sequence[int]) -> float:
        return DRAFT_COST * len(rows) / (self._fixed_tokens + len(rows))

    def cut(self, rows: Sequence[int], proposals: list[np.ndarray]) -> list[np.ndarray]:
        """Return the part of each row's proposals that is worth verifying."""
        if not self._limits.adaptive_drafts:
            return proposals
        worth = self._worth(rows)
        gain = 0.0
        kept = []
        for row, proposal in zip(rows, proposals, strict=True):
            self._next[row] = int(proposal[0]) if len(proposal) else None
            rate = self._rates[row]
            count = len(proposal) if rate >= worth else 0
            gain += rate * (1 - rate**count) / (1 - rate) - worth * count
            kept.append(proposal[:count])
        if len(rows) > 1 and gain < min(MIXED_COST * len(rows), MOST_MIXED_COST):
            return [proposal[:0] for proposal in proposals]
        return kept

    def observe(
        self, rows: Sequence[int], offsets: np.ndarray, tokens: np.ndarray, counts: np.ndarray
    ) -> None:
        """Update the estimates. offsets, tokens, counts: what the sampler got and returned (see
        `SampleStep` and `Sampled`)."""
        drafts = (np.diff(offsets) - 1).tolist()
        first = tokens[:, 0].tolist()
        for row, tried, token, count in zip(rows, drafts, first, counts.tolist(), strict=True):
            right = count - 1
            wrong = count <= tried
            if not tried and (shown := self._next[row]) is not None:
                right = int(token == shown)
                wrong = token != shown
            rate = 1 - (1 - self._rates[row]) * (1 - WEIGHT) ** right
            self._rates[row] = min(
                max(rate * (1 - WEIGHT) if wrong else rate, LOWEST_RATE), HIGHEST_RATE
            )
            self._usual += USUAL_WEIGHT * (self._rates[row] - self._usual)
