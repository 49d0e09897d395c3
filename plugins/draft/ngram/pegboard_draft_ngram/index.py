"""The n-grams of one request, and where they first occurred."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

FACTOR = 0x9E3779B97F4A7C15  # odd, so that multiplication modulo 2^64 loses nothing
MASK = 2**64 - 1


class NGramIndex:
    """Maps each n-gram, shortest ≤ n ≤ longest, to the position after its first occurrence.

    An n-gram is named by a polynomial of its token ids modulo 2^64, which numpy computes for a
    whole prompt at once. Two n-grams with the same name give a wrong draft, which the model
    rejects.
    """

    def __init__(self, token_ids: np.ndarray, shortest: int, longest: int) -> None:
        """token_ids: int [n]."""
        self.lengths = range(longest, shortest - 1, -1)
        self.num_tokens = 0
        self._ends: dict[int, dict[int, int]] = {}
        for n in self.lengths:
            names = _names(token_ids[:-1], n).tolist()  # the last n-gram has no token after it yet
            positions = range(n, n + len(names))
            # the first occurrence is kept
            self._ends[n] = dict(zip(reversed(names), reversed(positions), strict=True))
        self.num_tokens = len(token_ids)

    def append(self, token_ids: np.ndarray, first: int) -> None:
        """Add the tokens token_ids[first:], where token_ids [n] is the whole request. The n-grams
        that now have a successor are added: those that end at first - 1 … n - 2."""
        longest = self.lengths[0]
        for end in range(max(first, 1), len(token_ids)):
            tail = token_ids[max(end - longest, 0) : end].tolist()
            for n, name in self._tail_names(tail):
                self._ends[n].setdefault(name, end)
        self.num_tokens = len(token_ids)

    def find(self, token_ids: np.ndarray) -> int | None:
        """Return the position after the first occurrence of the longest n-gram at the end of
        token_ids [n], or None."""
        end = None
        for n, name in self._tail_names(
            token_ids[max(len(token_ids) - self.lengths[0], 0) :].tolist()
        ):
            end = self._ends[n].get(name, end)
        return end

    def _tail_names(self, tail: list[int]) -> Iterable[tuple[int, int]]:
        """Yield (n, name of the last n tokens of tail), the shortest first."""
        name = 0
        power = 1
        shortest = self.lengths[-1]
        for n, token in enumerate(reversed(tail), start=1):
            name = (name + (token + 1) * power) & MASK
            power = power * FACTOR & MASK
            if n >= shortest:
                yield n, name


def _names(token_ids: np.ndarray, n: int) -> np.ndarray:
    """Return the names of all n-grams of token_ids, uint64 [len − n + 1]."""
    count = len(token_ids) - n + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    values = token_ids.astype(np.uint64) + np.uint64(1)
    names = np.zeros(count, np.uint64)
    power = 1
    for offset in range(n - 1, -1, -1):  # arithmetic of uint64 arrays wraps around
        names += values[offset : offset + count] * np.uint64(power)
        power = power * FACTOR & MASK
    return names
