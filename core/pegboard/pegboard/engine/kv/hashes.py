"""Names for KV blocks: a chain of hashes over everything that decides what a block holds.

    hash[i] = H(hash[i - 1], token ids of block i, extra keys of block i)

Because every hash contains its parent, equal hashes mean equal history from the first token on. The extra keys are what token
ids do not say: the adapter, and the cache salt (first block only; the chain spreads it). Nothing is pickled: the encoding is
canonical, so engines on different hosts agree and a connector can exchange blocks by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from pegboard.engine.requests import Request
from pegboard.errors import ConfigError

ROOT_HASH = hashlib.sha256(b"pegboard-block-chain").digest()
"""Parent of every first block; a constant, so that all engines share one name space."""

HashBlock = Callable[[bytes, Sequence[int], bytes], bytes]
"""(parent hash, token ids, encoded extra keys) → hash. The extra keys are b"" when there are none."""


def sha256_block(parent: bytes, token_ids: Sequence[int], extra: bytes) -> bytes:
    """SHA-256 over parent ‖ token ids as little-endian int64 ‖ extra keys. 32 bytes.

    No field needs a length: the parent has 32 bytes, and a chain has one block size.
    """
    return hashlib.sha256(parent + np.asarray(token_ids, "<i8").tobytes() + extra).digest()


def sha256_cbor_block(parent: bytes, token_ids: Sequence[int], extra: bytes) -> bytes:
    """SHA-256 over the canonical CBOR (RFC 8949 §4.2) of [parent, [token ids], extra keys or null]: easy to redo elsewhere."""
    tokens = b"".join(_cbor_int(token) for token in token_ids)
    tail = _cbor_head(2, len(extra)) + extra if extra else b"\xf6"
    return hashlib.sha256(b"\x83" + _cbor_head(2, len(parent)) + parent + _cbor_head(4, len(token_ids)) + tokens + tail).digest()


def _cbor_head(major: int, value: int) -> bytes:
    """Shortest head of a CBOR item: major type and its non-negative argument."""
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
    """Extends `request.block_hashes`: one hash per `block_size` tokens, as far as the confirmed tokens reach."""

    def __init__(self, algo: str, block_size: int) -> None:
        """ConfigError for an unknown `algo`."""
        if algo not in HASH_ALGOS:
            raise ConfigError(f"unknown prefix_caching_hash_algo {algo!r}; expected one of {', '.join(HASH_ALGOS)}")
        self._hash = HASH_ALGOS[algo]
        self.block_size = block_size

    def extend(self, request: Request) -> None:
        """Hash the blocks that became full since the last call."""
        hashes, size = request.block_hashes, self.block_size
        tokens = request.all_token_ids
        parent = hashes[-1] if hashes else ROOT_HASH
        for index in range(len(hashes), len(tokens) // size):
            start = index * size
            parent = self._hash(parent, tokens[start : start + size], self._extra_keys(request, start))
            hashes.append(parent)

    def _extra_keys(self, request: Request, start: int) -> bytes:
        """Canonical bytes of what else decides the block at token `start`; b"" in the common case."""
        keys: list[object] = []
        if request.lora is not None:
            keys.append(["lora", request.lora.name, request.lora.digest])
        if request.cache_salt is not None and start == 0:
            keys.append(["salt", request.cache_salt])
        return msgspec.msgpack.encode(keys) if keys else b""
