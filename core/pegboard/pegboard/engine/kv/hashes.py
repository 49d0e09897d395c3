"""The names of KV blocks.

The name of a full block is a hash over everything that determines its content:

    hash[i] = H(hash[i - 1], token ids of block i, extra keys of block i)

Because every hash contains its parent, equal hashes mean equal history from the first token on. The
parent of the first block is a hash of the KV plan's identity (checkpoint, types, layout), so
engines whose blocks differ never compute the same hash. Extra keys belong to spans of tokens. Those
of the whole request (its adapter and its cache salt) belong to the first token only, because all
later hashes depend on it.
Nothing is pickled. The encoding is canonical, so equal engines on different hosts compute the same
hashes, and a connector can exchange blocks by name.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter

import msgspec
import numpy as np

from pegboard.engine.prompt_embeds import rows_digest
from pegboard.engine.requests import HashSpan, Request


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
        self.restart(identity)

    def restart(self, identity: str) -> None:
        """Give the blocks that are hashed from now on another identity."""
        self._root = root_hash(identity)

    def extend(self, request: Request) -> None:
        """Hash the blocks that have become full since the last call."""
        if request.hash_spans is None:
            request.hash_spans = hash_spans(request, self.block_size)
        hashes = request.block_hashes
        size = self.block_size
        tokens = request.all_token_ids
        parent = hashes[-1] if hashes else self._root
        for index in range(len(hashes), len(tokens) // size):
            start = index * size
            extra = _extra_keys(request.hash_spans, start, start + size)
            parent = self._hash(parent, tokens[start : start + size], extra)
            hashes.append(parent)


def hash_spans(request: Request, block_size: int) -> list[HashSpan]:
    """Return the keys of a request's block hashes apart from its token ids, in order. No span
    crosses the end of a block."""
    spans: list[HashSpan] = []
    if (lora := request.lora) is not None:
        spans.append(HashSpan(0, 1, ("lora", lora.lora_name, lora.digest)))
    if request.cache_salt is not None:
        spans.append(HashSpan(0, 1, ("salt", request.cache_salt)))
    for embeds in request.prompt_embeds:
        for start, stop in _pieces(embeds.start, embeds.stop, block_size):
            spans.append(HashSpan(start, stop, ("embeds", rows_digest(embeds, start, stop))))
    for item in request.media:
        for first, count in item.places:
            for start, stop in _pieces(first, first + count, block_size):
                spans.append(HashSpan(start, stop, ("media", item.digest, start - item.start)))
    for name, values in request.token_inputs.items():
        for start, stop in _pieces(0, len(values), block_size):
            spans.append(HashSpan(start, stop, (name, *values[start:stop])))
    spans += [_whole(request, start, stop, spans) for start, stop in request.whole]
    return sorted(spans)


def _whole(request: Request, start: int, stop: int, spans: Sequence[HashSpan]) -> HashSpan:
    """Return the key of tokens that attend to each other: a digest of all of them."""
    inside = sorted(span for span in spans if span.start < stop and start < span.stop)
    content = msgspec.msgpack.encode((request.prompt_token_ids[start:stop], inside))
    return HashSpan(start, start + 1, ("whole", hashlib.sha256(content).hexdigest()))


def _pieces(start: int, stop: int, block_size: int) -> Iterator[tuple[int, int]]:
    """Cut a span where blocks end."""
    ends = range(start // block_size * block_size + block_size, stop, block_size)
    return pairwise([start, *ends, stop])


def _extra_keys(spans: Sequence[HashSpan], start: int, stop: int) -> bytes:
    """Return the canonical bytes of the extra keys of the block with the tokens start … stop, or
    b"" if it has none: [[first token in the block, token after the last one, key], …]."""
    first, end = (bisect_left(spans, bound, key=itemgetter(0)) for bound in (start, stop))
    keys = [(span.start - start, span.stop - start, span.key) for span in spans[first:end]]
    return msgspec.msgpack.encode(keys) if keys else b""
