"""Random numbers as a function of (seed, output position). Nothing else changes them: not the
batch, preemption, speculation or steps in flight."""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). counter:
    uint64 [4, n]. key: uint64 [2, n]. Only 32 bits of each word are used. → uint64 [4, n] with 32
    random bits each."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = (product1 >> _SHIFT) ^ c1 ^ k0
        c1 = product1 & _LOW
        c2 = (product0 >> _SHIFT) ^ c3 ^ k1
        c3 = product0 & _LOW
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3])


def seeded_uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """seeds, positions: int64 [n] → float64 [n] in [0, 1) with 53 random bits each."""
    seeds = seeds.astype(np.uint64)
    positions = positions.astype(np.uint64)
    zero = np.zeros_like(seeds)
    counter = np.stack([positions & _LOW, positions >> _SHIFT, zero, zero])
    words = philox(counter, np.stack([seeds & _LOW, seeds >> _SHIFT]))
    high = words[0] >> np.uint64(5)
    low = words[1] >> np.uint64(6)
    numbers: np.ndarray = (high * 67108864.0 + low) / 9007199254740992.0
    return numbers


class SeededUniforms:
    """The same numbers for the rows of a step. `seeded_uniforms` takes 200 array operations for any
    number of positions, so each row gets the numbers of several positions at once."""

    SPAN = 32

    def __init__(self, max_num_seqs: int) -> None:
        self._seeds = np.zeros(max_num_seqs, np.int64)
        self._firsts = np.full(max_num_seqs, -1)
        self._numbers = np.empty((max_num_seqs, self.SPAN))

    def of(self, rows: np.ndarray, seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return float64 [n]. A row may occur more than once, for example with drafts."""
        firsts = positions - positions % self.SPAN
        known = (self._firsts[rows] == firsts) & (self._seeds[rows] == seeds)
        if not known.all():
            missing = np.flatnonzero(~known)
            self._make(rows[missing], seeds[missing], firsts[missing])
            if (self._firsts[rows] != firsts).any():  # a row needs positions in two spans
                return seeded_uniforms(seeds, positions)
        return self._numbers[rows, positions - firsts]

    def _make(self, rows: np.ndarray, seeds: np.ndarray, firsts: np.ndarray) -> None:
        self._seeds[rows] = seeds
        self._firsts[rows] = firsts
        positions = (firsts[:, None] + np.arange(self.SPAN)).ravel()
        self._numbers[rows] = seeded_uniforms(np.repeat(seeds, self.SPAN), positions).reshape(
            -1, self.SPAN
        )
