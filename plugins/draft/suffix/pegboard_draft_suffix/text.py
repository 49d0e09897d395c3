"""Text of one or more answers, and where in it each run of a few tokens occurred."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

ANCHOR = 2
"""Every run of this many tokens is indexed. A match is at least this long."""
BITS = 32
MASK = (1 << BITS * ANCHOR) - 1
SHARDS = 256
"""The index is split into this many dicts. One dict would move millions of entries at once when it
grows."""
END = -1
"""Follows each answer of a text of several answers. It is not a token id."""


class Text:
    """Tokens, of which the oldest may be forgotten. A position counts all tokens that were ever
    added.

    The occurrences of a run are a chain, as in the LZ77 compressors: `_latest` maps the run to the
    position after its last occurrence, and `_previous` maps that to the one before.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self.first = 0  # position of tokens[0]
        self.floor = 0  # position of the oldest token that is not forgotten
        self._latest: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._previous = array("q")  # of each position; no earlier occurrence: -1
        self._run = 0
        self._run_length = 0  # before the end, and before the floor
        self._floor_run = 0
        self._floor_run_length = 0

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.first + len(self.tokens)

    def append(self, token_ids: Iterable[int]) -> None:
        """Add tokens. The run before each of them is indexed, because it now has a token after
        it."""
        tokens = self.tokens
        previous = self._previous
        shards = self._latest
        run = self._run
        length = self._run_length
        position = self.end
        for token in token_ids:
            if length >= ANCHOR:
                latest = shards[(run ^ run >> BITS) % SHARDS]
                previous.append(latest.get(run, -1))
                latest[run] = position
            else:
                previous.append(-1)
            tokens.append(token)
            position += 1
            if token == END:
                run = 0
                length = 0
            else:
                run = (run << BITS | token) & MASK
                length = length + 1
        self._run = run
        self._run_length = length

    def forget(self, count: int) -> None:
        """Forget this many of the oldest tokens. Their memory is given back when they are an eighth
        of all."""
        start = self.floor - self.first
        run = self._floor_run
        length = self._floor_run_length
        for position, token in enumerate(self.tokens[start : start + count], start=self.floor):
            if length >= ANCHOR and (latest := self._shard(run)).get(run) == position:
                del latest[run]
            run, length = (0, 0) if token == END else ((run << BITS | token) & MASK, length + 1)
        self._floor_run = run
        self._floor_run_length = length
        self.floor = min(self.floor + count, self.end)
        if 8 * (forgotten := self.floor - self.first) > len(self.tokens):
            del self.tokens[:forgotten], self._previous[:forgotten]
            self.first = self.floor

    def _shard(self, run: int) -> dict[int, int]:
        return self._latest[(run ^ run >> BITS) % SHARDS]

    def matches(self, tail: array[int], most: int) -> list[tuple[int, int]]:
        """Find the latest occurrences of the last `ANCHOR` tokens of tail. Returns for each, the
        latest first, how many tokens agree with those of tail, and the index in `tokens` of the
        token after them."""
        matches: list[tuple[int, int]] = []
        count = len(tail)
        if count < ANCHOR:
            return matches
        run = 0
        for token in tail[-ANCHOR:]:
            run = run << BITS | token
        position = self._latest[(run ^ run >> BITS) % SHARDS].get(run, -1)
        tokens = self.tokens
        first = self.first
        while position >= self.floor and len(matches) < most:
            index = position - first
            longest = index if index < count else count
            same = ANCHOR
            if same < longest and tokens[index - same - 1] == tail[count - same - 1]:
                if tokens[index - longest : index] == tail[count - longest :]:
                    same = longest
                while same < longest and tokens[index - same - 1] == tail[count - same - 1]:
                    same += 1
            matches.append((same, index))
            position = self._previous[index]
        return matches
