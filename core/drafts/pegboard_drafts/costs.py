"""What a step takes, learned from the steps that were measured.

    seconds = scale · (a + b · rows + c · drafts + d · rows, at most MOST_ROWS, if it has drafts)

The last part is there because a step with drafts is not one token per row. The scale follows every
step, so it tells how fast the machine is now. The four numbers, which say how the parts compare,
begin with what was measured on one CPU; a Kalman filter (Kalman 1960) follows them, and trusts each
step as far as its error is usual.
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
DRIFT = 0.005
"""How far each number may change from one step to the next, as a share of it."""
NOISE = 0.15
"""The usual error of a measurement, as a share of it."""
LARGEST_ERROR = 0.3
"""Larger errors, as a share of what was expected, count as this one, and only in the scale:
something else took the time, or the machine has become faster or slower."""
FIRST_STEPS = 8
"""So many steps only set the scale. Any of them may be unusual."""
SCALE_WEIGHT = 0.2
"""The weight of the newest step in the scale."""
SMALLEST = 0.02


class StepCosts:
    """The times of decode steps, in decoded tokens of one CPU. fixed_tokens: see
    `Device.fixed_tokens`. scale: seconds in one of these; 0 = nothing is measured."""

    def __init__(self, fixed_tokens: float) -> None:
        self._numbers = np.array([fixed_tokens, 1.0, FIRST_DRAFT, FIRST_MIXED])
        self._spread = np.diag((DOUBT * self._numbers) ** 2)
        self._num_steps = 0
        self.scale = 0.0

    def observe(self, rows: int, drafts: int, seconds: float) -> None:
        """Learn from a step of this many rows, which has verified this many drafts."""
        used = features(rows, drafts)
        expected = float(used @ self._numbers)
        self._num_steps += 1
        if self._num_steps <= FIRST_STEPS:
            scale = seconds / expected
            self.scale = min(scale, self.scale or scale)
            return
        error = seconds / self.scale / expected - 1
        self.scale *= 1 + SCALE_WEIGHT * min(max(error, -LARGEST_ERROR), LARGEST_ERROR)
        if abs(error) > LARGEST_ERROR:
            return
        self._spread[np.diag_indices(4)] += (DRIFT * self._numbers) ** 2
        along = self._spread @ used
        gain = along / (float(used @ along) + (NOISE * expected) ** 2)
        self._numbers = np.maximum(self._numbers + gain * error * expected, SMALLEST)
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

    def of(self, seconds: float) -> float:
        """Return this time in the unit of the others; 0 if nothing is measured."""
        return seconds / self.scale if self.scale else 0.0


def features(rows: int, drafts: int) -> np.ndarray:
    """Return what each of the four numbers is multiplied with."""
    mixed = min(rows, MOST_ROWS) if drafts and rows > 1 else 0
    return np.array([1.0, rows, drafts, mixed])
