"""What a step takes, learned from the steps that were measured.

    seconds = a + b · rows + c · drafts + d · (rows, at most MOST_ROWS, if there are drafts)

The last part is there because a step with drafts is not one token per row. A Kalman filter
(Kalman 1960) follows the four numbers. It begins with what was measured on one CPU, in the scale of
the first step, and trusts each step as far as its error is usual.
"""

from __future__ import annotations

import numpy as np

FIRST_DRAFT = 0.6
"""The time of a draft token at first, in decoded tokens. It is below 1 because matrix products of
more rows are faster."""
FIRST_MIXED = 0.75
MOST_ROWS = 8
DOUBT = 0.5
"""How far the first numbers may be wrong, as a share of each."""
DRIFT = 0.01
"""How far each number may change from one step to the next, as a share of it."""
NOISE = 0.1
"""The usual error of a measurement, as a share of it."""
LARGEST_ERROR = 0.5
"""Larger errors count as this one. Something else took the time."""
SMALLEST = 0.02
"""No number becomes smaller than this share of a decoded token's time at first."""


class StepCosts:
    """The times of decode steps, in seconds, or in decoded tokens until a step is measured.
    fixed_tokens: see `Device.fixed_tokens`."""

    def __init__(self, fixed_tokens: float) -> None:
        self._numbers = np.array([fixed_tokens, 1.0, FIRST_DRAFT, FIRST_MIXED])
        self._floor = np.full(4, SMALLEST)
        self._spread = np.diag((DOUBT * self._numbers) ** 2)
        self._is_measured = False

    def observe(self, rows: int, drafts: int, seconds: float) -> None:
        """Learn from a step of this many rows, which has verified this many drafts."""
        used = features(rows, drafts)
        expected = float(used @ self._numbers)
        if not self._is_measured:
            self._is_measured = True
            scale = seconds / expected
            self._numbers *= scale
            self._floor *= scale
            self._spread *= scale * scale
            return
        self._spread[np.diag_indices(4)] += (DRIFT * self._numbers) ** 2
        along = self._spread @ used
        gain = along / (float(used @ along) + (NOISE * expected) ** 2)
        most = LARGEST_ERROR * expected
        error = min(max(seconds - expected, -most), most)
        self._numbers = np.maximum(self._numbers + gain * error, self._floor)
        self._spread -= np.outer(gain, along)

    def plain(self, rows: int) -> float:
        """Return the time of a step without drafts."""
        return float(self._numbers[0] + self._numbers[1] * rows)

    @property
    def draft(self) -> float:
        """The time of one more draft in a step."""
        return float(self._numbers[2])

    def mixed(self, rows: int) -> float:
        """Return the time that any drafts add to a step."""
        return float(self._numbers[3] * min(rows, MOST_ROWS)) if rows > 1 else 0.0


def features(rows: int, drafts: int) -> np.ndarray:
    """Return what each of the four numbers is multiplied with."""
    mixed = min(rows, MOST_ROWS) if drafts and rows > 1 else 0
    return np.array([1.0, rows, drafts, mixed])
