"""How many drafts each row verifies in the next step.

A row has an estimate p of the probability that its next draft token is right. The k-th draft token
of a step is then accepted with probability p^k. It is worth its place if that is at least the
number of output tokens that the time for one more token would give elsewhere. In a batch of B rows
that number is C · B / (F + B), where F is the time of a step that does not depend on its tokens, in
tokens, and C the time of a draft token, in decoded tokens: the larger the batch, the better drafts
must be.

A row that verifies nothing still gets one proposal, which is compared with the next token. So its
estimate rises as soon as the text repeats itself, and until then its steps are plain decoding.
"""

from __future__ import annotations

from math import log

import numpy as np

from pegboard.interfaces.draft import DraftSetup, DraftStep

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
    """The estimates of all rows. A proposer asks `wanted` how many drafts to propose, and returns
    those that `cut` keeps. With `spec_adaptive` off, both allow all."""

    def __init__(self, setup: DraftSetup) -> None:
        limits = setup.limits
        self._is_adaptive = setup.is_adaptive
        self._fixed_tokens = setup.fixed_tokens
        self._rates = [FIRST_RATE] * limits.max_num_seqs
        self._usual = FIRST_RATE
        self._next: list[int | None] = [None] * limits.max_num_seqs

    def add(self, row: int) -> None:
        """A request in this row starts or resumes. Its first estimate is what was usual in the last
        requests."""
        self._rates[row] = self._usual
        self._next[row] = None

    def wanted(self, step: DraftStep) -> list[int]:
        """Learn what became of the last drafts, and return how many to propose for each row."""
        most: list[int] = step.max_drafts.tolist()
        if not self._is_adaptive or not most:
            return most
        self._observe(step)
        worth = log(self._worth(len(most)))
        rows = step.rows.tolist()
        return [
            min(limit, max(1, int(worth / log(self._rates[row]))))
            for row, limit in zip(rows, most, strict=True)
        ]

    def _worth(self, num_rows: int) -> float:
        return DRAFT_COST * num_rows / (self._fixed_tokens + num_rows)

    def cut(self, step: DraftStep, proposals: list[np.ndarray]) -> list[np.ndarray]:
        """Return the part of each row's proposals that is worth verifying."""
        if not self._is_adaptive:
            return proposals
        num_rows = len(step.rows)
        worth = self._worth(num_rows)
        gain = 0.0
        kept = []
        for row, proposal in zip(step.rows.tolist(), proposals, strict=True):
            self._next[row] = int(proposal[0]) if len(proposal) else None
            rate = self._rates[row]
            count = len(proposal) if rate >= worth else 0
            gain += rate * (1 - rate**count) / (1 - rate) - worth * count
            kept.append(proposal[:count])
        if num_rows > 1 and gain < min(MIXED_COST * num_rows, MOST_MIXED_COST):
            return [proposal[:0] for proposal in proposals]
        return kept

    def _observe(self, step: DraftStep) -> None:
        """Update the estimates."""
        outcomes = zip(
            step.rows.tolist(),
            step.history,
            step.num_verified.tolist(),
            step.num_new.tolist(),
            strict=True,
        )
        for row, history, tried, count in outcomes:
            right = count - 1
            wrong = count <= tried
            if not tried and (shown := self._next[row]) is not None:
                right = int(history[-1] == shown)
                wrong = not right
            rate = 1 - (1 - self._rates[row]) * (1 - WEIGHT) ** right
            self._rates[row] = min(
                max(rate * (1 - WEIGHT) if wrong else rate, LOWEST_RATE), HIGHEST_RATE
            )
            self._usual += USUAL_WEIGHT * (self._rates[row] - self._usual)
