"""How long KV blocks stay, for some of them chosen by chance: what tells whether the cache is too small for its load."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

NUM_GAPS = 3
"""Gaps between uses that are kept of a block, the latest ones: as many as in vLLM."""


@dataclass(slots=True)
class _Stay:
    """A watched block since it was taken. uses: times of the latest prefix hits."""

    taken_s: float
    last_use_s: float
    uses: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_GAPS + 1))


class BlockResidency:
    """Watches a share of the blocks, from when they are taken until they are taken again. Times in seconds.

    lifetimes: from taking to losing the content; idle_times: from the last use to that; reuse_gaps: between the last few prefix
    hits of a block. All of blocks that have lost their content since `clear`.
    """

    def __init__(self, share: float, *, clock: Callable[[], float] = time.monotonic, seed: int | None = None) -> None:
        self.lifetimes: list[float] = []
        self.idle_times: list[float] = []
        self.reuse_gaps: list[float] = []
        self._share = share
        self._clock = clock
        self._chance = random.Random(seed)
        self._watched: dict[int, _Stay] = {}

    def taken(self, block_ids: Iterable[int]) -> None:
        """Blocks got new content, and lost what they had."""
        now = self._clock()
        for block_id in block_ids:
            stay = self._watched.pop(block_id, None)
            if stay is not None:
                self._end(stay, now)
            if self._chance.random() < self._share:
                self._watched[block_id] = _Stay(now, now)

    def used(self, block_id: int) -> None:
        """A prefix hit."""
        stay = self._watched.get(block_id)
        if stay is not None:
            stay.last_use_s = self._clock()
            stay.uses.append(stay.last_use_s)

    def forget(self) -> None:
        """The cache was emptied at once, which says nothing about its size."""
        self._watched.clear()

    def clear(self) -> None:
        """What has been gathered was read."""
        self.lifetimes, self.idle_times, self.reuse_gaps = [], [], []

    def _end(self, stay: _Stay, now: float) -> None:
        self.lifetimes.append(now - stay.taken_s)
        self.idle_times.append(now - stay.last_use_s)
        uses = list(stay.uses)
        self.reuse_gaps += [later - earlier for earlier, later in zip(uses, uses[1:], strict=False)]
