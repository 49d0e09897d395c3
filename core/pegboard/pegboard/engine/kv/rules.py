"""What each retention rule means for blocks: how many a request needs, which ones it may drop, what a prefix hit needs.

One small object per KV group. All of them agree on one statement: *given that the first n tokens are computed, the blocks in
`expired(n)` are never read again*. Dropping what a window has passed and finding prefix hits both follow from it: a hit of n
tokens needs exactly the blocks that are not expired at n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pegboard.interfaces.attention import Chunk, Full, KVGroup, Retain, State, Window

Find = Callable[[bytes], int | None]
"""Block id of a cached block by its hash, within one group."""

NEVER = 1 << 60
"""More tokens than any request has."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class FullRule:
    """Every token of the request is kept: full attention, and the common part of the rules below.

    hash_stride: hashes per block of this group (its block size over the hash block size).
    """

    def __init__(self, group: KVGroup, hash_block_size: int) -> None:
        self.block_size = group.block_size
        self.hash_stride = group.block_size // hash_block_size

    def blocks_needed(self, num_tokens: int) -> int:
        """Table entries (dropped ones included) that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def expired(self, num_computed_tokens: int) -> range:
        """Table entries that no later token reads once so many tokens are computed."""
        return range(0)

    def next_expiry(self, num_computed_tokens: int) -> int:
        """Smallest larger number of computed tokens at which more may be expired."""
        return NEVER

    def max_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        """Most blocks a request of `num_tokens` holds at once when at most `chunk_tokens` are computed before dropping."""
        return self.blocks_needed(num_tokens)

    def hit(self, find: Find, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> int:
        """Longest prefix of at most `max_tokens` tokens, a multiple of `alignment`, that this group can serve.

        When a block that n tokens need is missing, every shorter prefix that still contains the block needs it too (what is
        expired only grows with n), so the search goes on at the start of that block.
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
        """The table of a hit of `num_tokens` tokens: cached blocks, 0 where none is needed."""
        expired = self.expired(num_tokens)
        table = []
        for index in range(num_tokens // self.block_size):
            block_id = None if index in expired else find(self.block_hash(hashes, index))
            table.append(block_id or 0)
        return table

    def block_hash(self, hashes: Sequence[bytes], index: int) -> bytes:
        """Hash of full block `index`: the chain's value at its last token."""
        return hashes[(index + 1) * self.hash_stride - 1]

    def _first_missing(self, find: Find, hashes: Sequence[bytes], num_tokens: int) -> int | None:
        expired = self.expired(num_tokens)
        for index in range(num_tokens // self.block_size):
            if index not in expired and find(self.block_hash(hashes, index)) is None:
                return index
        return None


class WindowRule(FullRule):
    """A token attends to itself, the `tokens - 1` tokens before it, and the first `sinks` tokens."""

    def __init__(self, group: KVGroup, hash_block_size: int) -> None:
        super().__init__(group, hash_block_size)
        retain = group.spec.retain
        assert isinstance(retain, Window)
        self._tokens = retain.tokens
        self._sink_blocks = blocks_for(retain.sinks, group.block_size)

    def expired(self, num_computed_tokens: int) -> range:
        """Blocks between the sinks and the first token that the next token still sees."""
        return range(self._sink_blocks, max(self._sink_blocks, (num_computed_tokens - self._tokens + 1) // self.block_size))

    def next_expiry(self, num_computed_tokens: int) -> int:
        num_passed = num_computed_tokens - self._tokens + 1
        return (max(num_passed, 0) // self.block_size + 1) * self.block_size + self._tokens - 1

    def max_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        live = blocks_for(self._tokens - 1 + chunk_tokens, self.block_size) + 1 + self._sink_blocks
        return min(self.blocks_needed(num_tokens), live)


class ChunkRule(FullRule):
    """A token attends to the tokens of its own chunk: those since the last multiple of `tokens`."""

    def __init__(self, group: KVGroup, hash_block_size: int) -> None:
        super().__init__(group, hash_block_size)
        retain = group.spec.retain
        assert isinstance(retain, Chunk)
        self._tokens = retain.tokens

    def expired(self, num_computed_tokens: int) -> range:
        return range(num_computed_tokens // self._tokens * self._tokens // self.block_size)

    def next_expiry(self, num_computed_tokens: int) -> int:
        return (num_computed_tokens // self._tokens + 1) * self._tokens

    def max_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        return min(self.blocks_needed(num_tokens), blocks_for(self._tokens + chunk_tokens, self.block_size) + 1)


class StateRule(FullRule):
    """One state per request: table entry 0 is the state, entries 1 … draft_states hold the states after each draft.

    A checkpoint is a copy of the state taken at a multiple of `checkpoint_every` tokens, cached under the chain's hash at
    that token. A hit needs that one block, which is copied into the request's own state.
    """

    def __init__(self, group: KVGroup, hash_block_size: int) -> None:
        super().__init__(group, hash_block_size)
        retain = group.spec.retain
        assert isinstance(retain, State)
        self.checkpoint_every = retain.checkpoint_every
        self._num_states = 1 + retain.draft_states
        self._hash_block_size = hash_block_size

    def blocks_needed(self, num_tokens: int) -> int:
        return self._num_states

    def max_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        return self._num_states + (1 if self.checkpoint_every else 0)

    def hit(self, find: Find, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> int:
        if not self.checkpoint_every:
            return 0
        for num_tokens in range(max_tokens - max_tokens % alignment, 0, -alignment):
            if num_tokens % self.checkpoint_every == 0 and find(self.checkpoint_hash(hashes, num_tokens)) is not None:
                return num_tokens
        return 0

    def hit_blocks(self, find: Find, hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """The checkpoint to copy from (it is not part of the request's own table)."""
        block_id = find(self.checkpoint_hash(hashes, num_tokens))
        assert block_id is not None, "hit() has found it"
        return [block_id]

    def checkpoint_hash(self, hashes: Sequence[bytes], num_tokens: int) -> bytes:
        """Name of the state after `num_tokens` tokens."""
        return hashes[num_tokens // self._hash_block_size - 1]


RULES: dict[type[Retain], type[FullRule]] = {Full: FullRule, Window: WindowRule, Chunk: ChunkRule, State: StateRule}


def make_rule(group: KVGroup, hash_block_size: int) -> FullRule:
    """The rule object of a group."""
    return RULES[type(group.spec.retain)](group, hash_block_size)
