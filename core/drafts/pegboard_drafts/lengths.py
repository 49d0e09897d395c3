"""How many drafts each row verifies in the next step.

A row has an estimate p of the probability that its next draft token is right. The k-th draft token
of a step is then accepted with probability p^k. It is worth its place if that is at least the
number of output tokens that the time for it would give elsewhere: the time of a draft token, times
the tokens per second of plain decoding, which is the number of rows over the time of a plain step
(see `costs`). A draft model also takes time for each depth, which all rows share.

A row that verifies nothing still gets one proposal, which is compared with the next token. So its
estimate rises when the text repeats itself, and until then its steps are plain decoding. Each time
the proposal is wrong or missing, the row waits twice as many steps for another. Many such rows take
turns. A draft model proposes for all rows together, and only now and then, because its proposals
take time.
"""

from __future__ import annotations

from math import log

import numpy as np

from pegboard.interfaces.draft import DraftSetup, DraftStep
from pegboard_drafts.costs import StepCosts

FIRST_RATE = 0.5
WEIGHT = 0.3
"""The weight of the newest draft token in the estimate."""
USUAL_WEIGHT = 0.01
"""The weight of a row's estimate in the estimate for new requests."""
NO_PROPOSAL = -1
"""Stands for a token in a row that was to get a proposal and got none."""
LOWEST_RATE = 0.01
HIGHEST_RATE = 0.995
PROBE_ROWS = 8
"""At most about so many rows that verify nothing get a proposal in a step."""
MOST_PAUSE = 8
"""A row that verifies nothing gets a proposal at least once in so many steps."""
PROBE_STEPS = 16
MOST_PROBE_STEPS = 128
"""A draft model whose drafts are not worth their time proposes after so many steps, and each time
after twice as many."""
MARGIN = 1.25
"""How much more than its time a draft must promise. What it promises is uncertain, and a step with
drafts is not scheduled ahead."""
PLAIN_STEPS = 8
"""One in so many steps without drafts is measured: each measurement takes time, and they are all
alike."""
DEPTH_WEIGHT = 0.1
"""The weight of the newest step in the estimate of a depth's time."""


class DraftLengths:
    """The estimates of all rows. A proposer asks `wanted` how many drafts to propose, and returns
    those that `cut` keeps. With `spec_adaptive` off, both allow all. A proposer with a model tells
    `took` how long it was."""

    def __init__(self, setup: DraftSetup) -> None:
        limits = setup.limits
        self._is_adaptive = setup.is_adaptive
        self._measures = setup.measures
        self._costs = StepCosts(setup.fixed_tokens)
        self._has_model = setup.forwards is not None
        self._depth_s = 0.0
        self._probe_steps = PROBE_STEPS
        self._num_skipped = 0
        self._num_steps = 0
        self._num_measured = -1
        self._rates = [FIRST_RATE] * limits.max_num_seqs
        self._usual = FIRST_RATE
        self._next: list[int | None] = [None] * limits.max_num_seqs
        self._pauses = [1] * limits.max_num_seqs

    def add(self, row: int) -> None:
        """A request in this row starts or resumes. Its first estimate is what was usual in the last
        requests."""
        self._rates[row] = self._usual
        self._next[row] = None
        self._pauses[row] = 1

    def wanted(self, step: DraftStep) -> list[int]:
        """Learn what became of the last drafts, and return how many to propose for each row."""
        most: list[int] = step.max_drafts.tolist()
        if not self._is_adaptive or not most:
            return most
        self._observe(step)
        worth = log(self._worth(len(most)))
        rows = step.rows.tolist()
        counts = [
            min(limit, int(worth / log(self._rates[row])))
            for row, limit in zip(rows, most, strict=True)
        ]
        self._num_steps += 1
        turns = 1 if self._has_model else max(1, counts.count(0) // PROBE_ROWS)
        counts = [
            count or min(limit, int((row + self._num_steps) % max(turns, self._pauses[row]) == 0))
            for row, count, limit in zip(rows, counts, most, strict=True)
        ]
        if self._has_model:
            counts = self._worth_their_depth(rows, counts)
        for row, count in zip(rows, counts, strict=True):
            self._next[row] = NO_PROPOSAL if count else None
        return counts

    def took(self, depths: int, seconds: float) -> None:
        """Learn that a draft model took this time for the drafts of so many depths."""
        if self._measures and depths:
            weight = DEPTH_WEIGHT if self._depth_s else 1.0
            self._depth_s += weight * (seconds / depths - self._depth_s)

    def cut(self, step: DraftStep, proposals: list[np.ndarray]) -> list[np.ndarray]:
        """Return the part of each row's proposals that is worth verifying."""
        if not self._is_adaptive:
            return proposals
        num_rows = len(step.rows)
        worth = self._worth(num_rows)
        gain = 0.0
        kept = []
        for row, proposal in zip(step.rows.tolist(), proposals, strict=True):
            if len(proposal):
                self._next[row] = int(proposal[0])
            rate = self._rates[row]
            count = len(proposal) if rate >= worth else 0
            gain += rate * (1 - rate**count) / (1 - rate) - worth * count
            kept.append(proposal[:count])
        if gain < self._tokens_in(self._costs.mixed(num_rows), num_rows):
            return [proposal[:0] for proposal in proposals]
        return kept

    def _tokens_in(self, cost: float, num_rows: int) -> float:
        """Return how many tokens plain decoding gives in this time, in the unit of `costs`."""
        return cost * num_rows / self._costs.plain(num_rows)

    def _worth(self, num_rows: int) -> float:
        """Return the probability from which on a draft is worth its time."""
        return min(MARGIN * self._tokens_in(self._costs.draft, num_rows), HIGHEST_RATE)

    def _worth_their_depth(self, rows: list[int], counts: list[int]) -> list[int]:
        """Return fewer drafts where those of a depth do not pay for the draft model's time."""
        rates = [self._rates[row] for row in rows]
        worth = self._worth(len(rows))
        depth = self._tokens_in(self._costs.of(self._depth_s), len(rows))
        value = 0.0
        best = (0.0, 0)
        for place in range(1, max(counts) + 1):
            gains = [
                rate**place - worth
                for rate, count in zip(rates, counts, strict=True)
                if count >= place
            ]
            value += sum(gains) - depth
            best = max(best, (value, place))
        if best[1]:
            self._probe_steps = PROBE_STEPS
            self._num_skipped = 0
            return [min(count, best[1]) for count in counts]
        self._num_skipped += 1
        if self._num_skipped < self._probe_steps:
            return [0] * len(counts)
        self._probe_steps = min(2 * self._probe_steps, MOST_PROBE_STEPS)
        self._num_skipped = 0
        return counts

    def _observe(self, step: DraftStep) -> None:
        """Update the estimates."""
        if self._measures:
            num_drafts = step.num_tokens - len(step.rows)
            self._num_measured += 1
            is_wanted = num_drafts or self._num_measured % PLAIN_STEPS == 0
            if is_wanted and num_drafts == int(step.num_verified.sum()):
                self._costs.observe(len(step.rows), num_drafts, step.seconds)
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
                is_right = history[-1] == shown
                waits = not (is_right or self._has_model)
                self._pauses[row] = min(2 * self._pauses[row], MOST_PAUSE) if waits else 1
                if shown != NO_PROPOSAL:
                    right = int(is_right)
                    wrong = not is_right
            rate = 1 - (1 - self._rates[row]) * (1 - WEIGHT) ** right
            self._rates[row] = min(
                max(rate * (1 - WEIGHT) if wrong else rate, LOWEST_RATE), HIGHEST_RATE
            )
            self._usual += USUAL_WEIGHT * (self._rates[row] - self._usual)
