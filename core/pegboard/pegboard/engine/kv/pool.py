"""The pool of equal-sized KV blocks. It knows which blocks are free, which are referenced, and
which are cached under which hash. It uses no torch.

A block is in one of three states:

    free         no references and no hash; taken first
    free, cached no references, but found by its hash; taken last, oldest first; it loses its hash
    (is evicted) only when taken referenced   a request, a pin or a copy holds it; never taken

Block 0 is the null block. It replaces dropped blocks in block tables and is never taken, freed or
cached.

The name of a full block is a hash over everything that determines its content:

    hash[i] = H(hash[i - 1], token ids of block i, extra keys of block i)

Because every hash contains its parent, equal hashes mean equal history from the first token on. The
parent of the first block is a hash of the KV plan's identity (checkpoint, types, layout), so
engines whose blocks differ never compute the same hash. The extra keys are the adapter and the
cache salt. The salt is in the first block only, because all later hashes depend on that one.
Nothing is pickled. The encoding is canonical, so equal engines on different hosts compute the same
hashes, and a connector can exchange blocks by name.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pegboard.engine.prompt_embeds import rows_digest
from pegboard.engine.requests import Request
from pegboard.interfaces.metrics import BlocksCleared, BlocksRemoved, KVEvent

NULL_BLOCK = 0

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


class BlockPool:
    """Holds blocks 1 … num_blocks-1. Every operation costs O(1) per block. The free list is in
    eviction order. residency: measures how long blocks stay."""

    def __init__(self, num_blocks: int, *, residency: BlockResidency | None = None) -> None:
        assert num_blocks >= 1, "the null block is always needed"
        self.num_blocks = num_blocks
        self.residency = residency
        self.events: list[KVEvent] | None = None
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
                if self.events is not None:
                    self.events.append(BlocksRemoved((key[1],), key[0]))
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
        if self.events is not None and self._key_of:
            self.events.append(BlocksCleared())
        self._key_of.clear()
        self._block_of.clear()
        if self.residency is not None:
            self.residency.forget()
        return True


# --- block hashes ---------------------------------------------------------------------------------


def root_hash(identity: str) -> bytes:
    """Return the parent hash of every first block of the engines with this identity (see
    KVPlan)."""
    return hashlib.sha256(b"pegboard-block-chain" + identity.encode()).digest()


HashBlock = Callable[[bytes, Sequence[int], bytes], bytes]
"""(parent hash, token ids, encoded extra keys) → hash. The extra keys are b"" if there are none."""


def sha256_block(parent: bytes, token_ids: Sequence[int], extra: bytes) -> bytes:
    """SHA-256 over parent ‖ token ids as little-endian int64 ‖ extra keys. 32 bytes.

    No field needs a length prefix: the parent has 32 bytes, and all blocks of a chain have the same
    number of tokens.
    """
    return hashlib.sha256(parent + np.asarray(token_ids, "<i8").tobytes() + extra).digest()


def sha256_cbor_block(parent: bytes, token_ids: Sequence[int], extra: bytes) -> bytes:
    """SHA-256 over the canonical CBOR (RFC 8949 §4.2) of [parent, [token ids], extra keys or null],
    which other programs can also compute easily."""
    tokens = b"".join(_cbor_int(token) for token in token_ids)
    tail = _cbor_head(2, len(extra)) + extra if extra else b"\xf6"
    return hashlib.sha256(
        b"\x83"
        + _cbor_head(2, len(parent))
        + parent
        + _cbor_head(4, len(token_ids))
        + tokens
        + tail
    ).digest()


def _cbor_head(major: int, value: int) -> bytes:
    """Return the shortest head of a CBOR item, given its major type and its non-negative
    argument."""
    if value < 24:
        return bytes([major << 5 | value])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << 8 * size:
            return bytes([major << 5 | code]) + value.to_bytes(size, "big")
    raise OverflowError(f"{value} does not fit a CBOR integer")


def _cbor_int(value: int) -> bytes:
    return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)


HASH_ALGOS: dict[str, HashBlock] = {"sha256": sha256_block, "sha256_cbor": sha256_cbor_block}


class BlockHasher:
    """Extends `request.block_hashes` with one hash per `block_size` confirmed tokens. identity: of
    the KV plan."""

    def __init__(self, algo: str, block_size: int, identity: str = "") -> None:
        self._hash = HASH_ALGOS[algo]
        self.block_size = block_size
        self._nonce = os.urandom(16).hex()
        self.restart(identity)

    def restart(self, identity: str) -> None:
        """Give the blocks that are hashed from now on another identity."""
        self._root = root_hash(identity)

    def extend(self, request: Request) -> None:
        """Hash the blocks that have become full since the last call."""
        hashes = request.block_hashes
        size = self.block_size
        tokens = request.all_token_ids
        parent = hashes[-1] if hashes else self._root
        for index in range(len(hashes), len(tokens) // size):
            start = index * size
            parent = self._hash(
                parent, tokens[start : start + size], self._extra_keys(request, start)
            )
            hashes.append(parent)

    def _extra_keys(self, request: Request, start: int) -> bytes:
        """Return the canonical bytes of the extra keys of the block at token `start`, or b"" if it
        has none. Only this engine knows the blocks of an adapter without a digest."""
        keys: list[object] = []
        if (lora := request.lora) is not None:
            keys.append(
                ["lora", lora.lora_name, lora.digest or f"{self._nonce}:{lora.lora_int_id}"]
            )
        if request.cache_salt is not None and start == 0:
            keys.append(["salt", request.cache_salt])
        if request.prompt_embeds is not None and start < request.num_prompt_tokens:
            keys.append(
                ["embeds", rows_digest(request.prompt_embeds, start, start + self.block_size)]
            )
        return msgspec.msgpack.encode(keys) if keys else b""
