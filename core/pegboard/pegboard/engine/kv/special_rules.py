"""The retention rules of chunks, states and encoders, and the choice of a group's rule."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.engine.kv.rules import NEVER, Find, FullRule, WindowRule, blocks_for
from pegboard.interfaces.attention import Chunk, Encoder, Full, KVGroup, Retain, State, Window


class ChunkRule(FullRule):
    """A token attends to the tokens of its chunk before it and to itself. Chunks start at multiples
    of `tokens`."""

    def expired(self, num_computed_tokens: int) -> range:
        size = self._retain.tokens
        return range(num_computed_tokens // size * size // self.block_size)

    def next_expiry(self, num_computed_tokens: int) -> int:
        size: int = self._retain.tokens
        return (num_computed_tokens // size + 1) * size

    def max_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        return min(
            self.blocks_needed(num_tokens),
            blocks_for(self._retain.tokens + chunk_tokens, self.block_size) + 1,
        )


class StateRule(FullRule):
    """One state per request: table entry 0 is the state, and entry 1 the one before the drafts of
    a step, if there are drafts.

    A checkpoint is a copy of the state taken at a multiple of `checkpoint_every` tokens, cached
    under the chain's hash at that token. A hit needs only that block, which is copied into the
    request's own state.
    """

    def __init__(self, group: KVGroup, hash_block_size: int) -> None:
        super().__init__(group, hash_block_size)
        self.checkpoint_every: int = self._retain.checkpoint_every
        self._num_states: int = 1 + self._retain.takes_drafts
        self._hash_block_size = hash_block_size

    def blocks_needed(self, num_tokens: int) -> int:
        return self._num_states

    def max_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        return self._num_states + (1 if self.checkpoint_every else 0)

    def unneeded(self, num_tokens: int) -> range:
        """Return all checkpoints but the last one. Checkpoint i is at the end of block i."""
        return range(num_tokens // self.block_size - 1)

    def hit(self, find: Find, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> int:
        if not self.checkpoint_every:
            return 0
        for num_tokens in range(max_tokens - max_tokens % alignment, 0, -alignment):
            if (
                num_tokens % self.checkpoint_every == 0
                and find(self.checkpoint_hash(hashes, num_tokens)) is not None
            ):
                return num_tokens
        return 0

    def hit_blocks(self, find: Find, hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """Return the checkpoint to copy from. It does not become part of the request's table."""
        block_id = find(self.checkpoint_hash(hashes, num_tokens))
        assert block_id is not None, "hit() found it"
        return [block_id]

    def checkpoint_hash(self, hashes: Sequence[bytes], num_tokens: int) -> bytes:
        """Return the hash of the state after `num_tokens` tokens."""
        return hashes[num_tokens // self._hash_block_size - 1]


class EncoderRule(FullRule):
    """Has room for all rows that an encoder can make, however many tokens the request has."""

    def blocks_needed(self, num_tokens: int) -> int:
        return blocks_for(self._retain.tokens, self.block_size)

    def capacity(self, num_blocks: int) -> int:
        return NEVER

    def num_shared(self, num_tokens: int) -> int:
        return self.blocks_needed(num_tokens)

    def hit(self, find: Find, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> int:
        return 0


RULES: dict[type[Retain], type[FullRule]] = {
    Full: FullRule,
    Window: WindowRule,
    Chunk: ChunkRule,
    State: StateRule,
    Encoder: EncoderRule,
}


def make_rule(group: KVGroup, hash_block_size: int) -> FullRule:
    """Return the rule object of a group."""
    return RULES[type(group.spec.retain)](group, hash_block_size)
