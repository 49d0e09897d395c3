"""The pool of equal-sized KV blocks: who is free, who is referenced, what is cached under which hash. No torch, no requests.

A block is in one of three states:

    free, without content worth keeping   taken first
    free, cached                          reference count 0 but findable by hash; taken last, oldest first, and only then
                                          does it lose its hash (evicted)
    referenced                            held by requests, pins or copies; never taken

Block 0 is the null block: it stands in block tables for blocks that were dropped and is never taken, freed or cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal

import msgspec

from pegboard.engine.kv.residency import BlockResidency

NULL_BLOCK = 0


class KVEvent(msgspec.Struct, frozen=True):
    """A block became findable ("stored"), lost its hash ("removed"), or all did ("cleared", the other fields empty)."""

    kind: Literal["stored", "removed", "cleared"]
    group: int = 0
    block_hash: bytes = b""
    block_id: int = 0


class BlockPool:
    """Blocks 1 … num_blocks-1. Every operation costs O(1) per block. The free list is kept in eviction order. residency: told
    of every block that is taken or gets another user."""

    def __init__(self, num_blocks: int, *, record_events: bool = False, residency: BlockResidency | None = None) -> None:
        assert num_blocks >= 1, "the null block is always there"
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._num_refs = [0] * num_blocks
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._block_of: dict[tuple[int, bytes], int] = {}
        self._events: list[KVEvent] | None = [] if record_events else None
        self.residency = residency

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that `find` can give, referenced or not."""
        return len(self._key_of)

    @property
    def usage(self) -> float:
        """Fraction of the blocks that are referenced."""
        return 1.0 - len(self._free) / (self.num_blocks - 1) if self.num_blocks > 1 else 0.0

    def take(self, n: int) -> list[int] | None:
        """n blocks off the eviction end, each with one reference and no hash; None when fewer are free (nothing is taken)."""
        if n > len(self._free):
            return None
        pop, num_refs, key_of = self._free.popitem, self._num_refs, self._key_of
        taken = [pop(last=False)[0] for _ in range(n)]
        for block_id in taken:
            num_refs[block_id] = 1
            if block_id in key_of:
                self._forget(block_id)
        if self.residency is not None:
            self.residency.taken(taken)
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        """One more reference on each (prefix hit, fork, pin). Null blocks are skipped."""
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
        """One reference less on each, in eviction order: give the tail of a request first, so that its prefix lives longest.
        Null blocks are skipped."""
        num_refs, free = self._num_refs, self._free
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
        """How many of these (cached) blocks are free, hence would leave the free list when touched."""
        return sum(1 for block_id in block_ids if block_id != NULL_BLOCK and self._num_refs[block_id] == 0)

    def find(self, group: int, block_hash: bytes) -> int | None:
        """The block that holds this history in this group."""
        return self._block_of.get((group, block_hash))

    def insert(self, group: int, block_hash: bytes, block_id: int) -> None:
        """Make a referenced block findable. When the hash is known already, the older block keeps it and this one stays
        private to its request."""
        key = (group, block_hash)
        if key in self._block_of or block_id in self._key_of:
            return
        assert self._num_refs[block_id] > 0, f"block {block_id} is not held"
        self._block_of[key] = block_id
        self._key_of[block_id] = key
        if self._events is not None:
            self._events.append(KVEvent("stored", group, block_hash, block_id))

    def reset(self) -> bool:
        """Forget every hash. False, and nothing happens, while any block is referenced."""
        if len(self._free) != self.num_blocks - 1:
            return False
        self._key_of.clear()
        self._block_of.clear()
        if self.residency is not None:
            self.residency.forget()
        if self._events is not None:
            self._events.append(KVEvent("cleared"))
        return True

    def drain_events(self) -> list[KVEvent]:
        """Events since the last call; always empty when the pool does not record them."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def _forget(self, block_id: int) -> None:
        key = self._key_of.pop(block_id)
        del self._block_of[key]
        if self._events is not None:
            self._events.append(KVEvent("removed", key[0], key[1], block_id))
