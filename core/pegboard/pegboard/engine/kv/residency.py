"""How long KV blocks stay cached."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

NUM_GAPS = 3
"""How many of the latest gaps between uses are kept for a watched block, as in vLLM."""


@dataclass(slots=True)
class _Stay:
    """What is recorded about a watched block since it was taken. uses: times of the latest prefix
    hits."""

    taken_s: float
    last_use_s: float
    uses: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_GAPS + 1))


class BlockResidency:
    """Measures how long a random share of the blocks stays cached, which shows whether the cache is
    too small for its load.

    All times are in seconds and belong to blocks that have lost their content since `clear`.
    lifetimes: from when the block was taken until it lost its content. idle_times: from its last
    use until then. reuse_gaps: between its latest prefix hits.
    """

    def __init__(
        self, share: float, *, clock: Callable[[], float] = time.monotonic, seed: int | None = None
    ) -> None:
        self._share = share
        self._clock = clock
        self._chance = random.Random(seed)
        self._watched: dict[int, _Stay] = {}
        self.clear()

    def taken(self, block_ids: Iterable[int]) -> None:
        """Record that blocks were taken for new content and lost their old content."""
        now = self._clock()
        for block_id in block_ids:
            stay = self._watched.pop(block_id, None)
            if stay is not None:
                self.lifetimes.append(now - stay.taken_s)
                self.idle_times.append(now - stay.last_use_s)
                uses = list(stay.uses)
                self.reuse_gaps += [
                    later - earlier for earlier, later in zip(uses, uses[1:], strict=False)
                ]
            if self._chance.random() < self._share:
                self._watched[block_id] = _Stay(now, now)

    def used(self, block_id: int) -> None:
        """Record a prefix hit on a block."""
        stay = self._watched.get(block_id)
        if stay is not None:
            stay.last_use_s = self._clock()
            stay.uses.append(stay.last_use_s)

    def forget(self) -> None:
        """Forget all watched blocks without measuring them. A reset of the cache says nothing about
        its size."""
        self._watched.clear()

    def clear(self) -> None:
        """Clear the results after they were read."""
        self.lifetimes: list[float] = []
        self.idle_times: list[float] = []
        self.reuse_gaps: list[float] = []
