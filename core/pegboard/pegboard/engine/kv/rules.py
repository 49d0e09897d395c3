"""The retention rules in terms of blocks: how many blocks a request needs, which it may drop, and
which a prefix hit needs.

There is one rule object per KV group. All rules are based on one statement: *once the first n
tokens are computed, the blocks in `expired(n)` are never read again*. These blocks can be dropped,
and a prefix hit of n tokens needs exactly the other blocks. The rules of chunks, states and
encoders are in `special_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pegboard.interfaces.attention import KVGroup

Find = Callable[[bytes], int | None]
"""Returns the id of the cached block with a hash, within one group, or None."""

NEVER = 1 << 60
"""More tokens than any request has."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks for `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class FullRule:
    """Keeps every token of the request, for full attention. The rules below inherit from it.

    hash_stride: hashes per block of this group (its block size over the hash block size).
    """

    def __init__(self, group: KVGroup, hash_block_size: int) -> None:
        self.block_size = group.block_size
        self.hash_stride = group.block_size // hash_block_size
        self._retain: Any = group.spec.retain

    def blocks_needed(self, num_tokens: int) -> int:
        """Return how many table entries `num_tokens` tokens need, including dropped ones."""
        return -(-num_tokens // self.block_size)

    def capacity(self, num_blocks: int) -> int:
        """Return how many tokens of a request fit in a table of `num_blocks` entries."""
        return num_blocks * self.block_size

    def num_shared(self, num_tokens: int) -> int:
        """Return how many table entries two requests with the same first `num_tokens` tokens can
        share, if they write different tokens after them."""
        return num_tokens // self.block_size

    def expired(self, num_computed_tokens: int) -> range:
        """Return the table entries that no later token reads once `num_computed_tokens` tokens are
        computed."""
        return range(0)

    def unneeded(self, num_tokens: int) -> range:
        """Return which of the cached blocks up to `num_tokens` a prefix of so many tokens does not
        need."""
        return self.expired(num_tokens)

    def next_expiry(self, num_computed_tokens: int) -> int:
        """Return the next number of computed tokens at which more entries may expire."""
        return NEVER

    def max_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        """Return the maximum number of blocks that a request of `num_tokens` tokens holds at any
        time, if at most `chunk_tokens` tokens are computed before expired blocks are dropped."""
        return self.blocks_needed(num_tokens)

    def hit(self, find: Find, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> int:
        """Return the length of the longest prefix that this group can serve: at most `max_tokens`,
        and a multiple of `alignment`.

        If a prefix of n tokens needs a block that is missing, every shorter prefix that contains
        the block also needs it, because a longer prefix never has fewer expired blocks. So the
        search goes on at the start of that block.
        """
        num_tokens = max_tokens - max_tokens % alignment
        while num_tokens > 0:
            missing = self._first_missing(find, hashes, num_tokens)
            if missing is None:
                return num_tokens
            num_tokens = missing * self.block_size
            num_tokens -= num_tokens % alignment
        return 0

    def hit_blocks(self, find: Find, hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """Return the table of a hit of `num_tokens` tokens: the cached blocks, and 0 where no block
        is needed."""
        expired = self.expired(num_tokens)
        table = []
        for index in range(num_tokens // self.block_size):
            block_id = None if index in expired else find(self.block_hash(hashes, index))
            table.append(block_id or 0)
        return table

    def block_hash(self, hashes: Sequence[bytes], index: int) -> bytes:
        """Return the hash of full block `index`, which is the chain's hash at its last token."""
        return hashes[(index + 1) * self.hash_stride - 1]

    def _first_missing(self, find: Find, hashes: Sequence[bytes], num_tokens: int) -> int | None:
        expired = self.expired(num_tokens)
        for index in range(num_tokens // self.block_size):
            if index not in expired and find(self.block_hash(hashes, index)) is None:
                return index
        return None


class WindowRule(FullRule):
    """A token attends to itself, the `tokens - 1` tokens before it, and the first `sinks`
    tokens."""

    def __init__(self, group: KVGroup, hash_block_size: int) -> None:
        super().__init__(group, hash_block_size)
        self._tokens = self._retain.tokens
        self._sink_blocks = blocks_for(self._retain.sinks, group.block_size)

    def expired(self, num_computed_tokens: int) -> range:
        """Return the blocks between the sinks and the first token that the next token attends
        to."""
        return range(
            self._sink_blocks,
            max(self._sink_blocks, (num_computed_tokens - self._tokens + 1) // self.block_size),
        )

    def next_expiry(self, num_computed_tokens: int) -> int:
        num_passed = num_computed_tokens - self._tokens + 1
        return (max(num_passed, 0) // self.block_size + 1) * self.block_size + self._tokens - 1

    def max_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        live = blocks_for(self._tokens - 1 + chunk_tokens, self.block_size) + 1 + self._sink_blocks
        return min(self.blocks_needed(num_tokens), live)
