"""The pool of equal-sized KV blocks. It knows which blocks are free, which are referenced, and
which are cached under which hash. It uses no torch.

A block is in one of three states:

    free         no references and no hash; taken first
    free, cached no references, but found by its hash; taken last, oldest first; it loses its hash
                 (is evicted) only when taken
    referenced   a request, a pin or a copy holds it; never taken

Block 0 is the null block. It replaces dropped blocks in block tables and is never taken, freed or
cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from pegboard.engine.kv.events import KVEvents
from pegboard.engine.kv.residency import BlockResidency

NULL_BLOCK = 0


class BlockPool:
    """Holds blocks 1 … num_blocks-1. Every operation costs O(1) per block. The free list is in
    eviction order. residency: measures how long blocks stay. events: is told what the prefix cache
    drops; None = nobody asks."""

    def __init__(
        self,
        num_blocks: int,
        *,
        residency: BlockResidency | None = None,
        events: KVEvents | None = None,
    ) -> None:
        assert num_blocks >= 1, "the null block is always needed"
        self.num_blocks = num_blocks
        self.residency = residency
        self._events = events
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._num_refs = [0] * num_blocks
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._block_of: dict[tuple[int, bytes], int] = {}

    @property
    def num_free(self) -> int:
        """The number of blocks that `take` can return, including cached ones."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """The number of blocks that `find` can return, referenced or not."""
        return len(self._key_of)

    @property
    def usage(self) -> float:
        """The fraction of the blocks that are referenced."""
        return 1.0 - len(self._free) / (self.num_blocks - 1) if self.num_blocks > 1 else 0.0

    def take(self, n: int) -> list[int] | None:
        """Take n blocks from the front of the eviction order, each with one reference and no hash.
        Return None and take nothing if fewer are free."""
        if n > len(self._free):
            return None
        pop = self._free.popitem
        num_refs = self._num_refs
        key_of = self._key_of
        taken = [pop(last=False)[0] for _ in range(n)]
        for block_id in taken:
            num_refs[block_id] = 1
            if (key := key_of.pop(block_id, None)) is not None:
                del self._block_of[key]
                if self._events is not None:
                    self._events.removed(*key)
        if self.residency is not None:
            self.residency.taken(taken)
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block (for a prefix hit, a fork or a pin). Null blocks are
        skipped."""
        num_refs = self._num_refs
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if num_refs[block_id] == 0:
                del self._free[block_id]
            num_refs[block_id] += 1
            if self.residency is not None:
                self.residency.used(block_id)

    def free(self, block_ids: Iterable[int]) -> None:
        """Remove one reference from each block, in eviction order. Pass the last blocks of a
        request first, so that its prefix stays longest. Null blocks are skipped."""
        num_refs = self._num_refs
        free = self._free
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            num_refs[block_id] -= 1
            assert num_refs[block_id] >= 0, f"block {block_id} was freed more often than taken"
            if num_refs[block_id] == 0:
                free[block_id] = None
                if block_id not in self._key_of:
                    free.move_to_end(block_id, last=False)

    def count_free(self, block_ids: Iterable[int]) -> int:
        """Return how many of these cached blocks are free, so that `touch` would remove them from
        the free list."""
        return sum(
            1 for block_id in block_ids if block_id != NULL_BLOCK and self._num_refs[block_id] == 0
        )

    def find(self, group: int, block_hash: bytes) -> int | None:
        """Return the block with this hash in this group, or None."""
        return self._block_of.get((group, block_hash))

    def insert(self, group: int, block_hash: bytes, block_id: int) -> bool:
        """Insert a referenced block under its hash. If another block already has the hash, that one
        keeps it, this block stays private to its request, and the result is False."""
        key = (group, block_hash)
        if key in self._block_of or block_id in self._key_of:
            return False
        assert self._num_refs[block_id] > 0, f"block {block_id} is not held"
        self._block_of[key] = block_id
        self._key_of[block_id] = key
        return True

    def reset(self) -> bool:
        """Forget every hash. Return False and do nothing while any block is referenced."""
        if len(self._free) != self.num_blocks - 1:
            return False
        if self._events is not None and self._key_of:
            self._events.cleared()
        self._key_of.clear()
        self._block_of.clear()
        if self.residency is not None:
            self.residency.forget()
        return True
