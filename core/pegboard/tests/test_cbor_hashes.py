"""The block hash that other programs can compute: SHA-256 over canonical CBOR."""

from __future__ import annotations

import hashlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pegboard.engine.kv.hashes import sha256_cbor_block


def test_cbor_is_canonical() -> None:
    # [h'70', [1, 24, 256], null], encoded by hand as in RFC 8949
    encoded = b"\x83\x41p\x83\x01\x18\x18\x19\x01\x00\xf6"
    assert sha256_cbor_block(b"p", [1, 24, 256], b"") == hashlib.sha256(encoded).digest()


def cbor(item: bytes | int | list[Any] | None) -> bytes:
    """Encode as RFC 8949 says, with heads as short as they can be."""
    if item is None:
        return b"\xf6"
    major = 0
    number = item
    content = b""
    if isinstance(item, bytes):
        major = 2
        number = len(item)
        content = item
    elif isinstance(item, list):
        major = 4
        number = len(item)
        content = b"".join(map(cbor, item))
    elif item < 0:
        major = 1
        number = -1 - item
    assert isinstance(number, int)
    if number < 24:
        return bytes([32 * major + number]) + content
    power = next(power for power in range(4) if number < 256 ** (1 << power))
    return bytes([32 * major + 24 + power]) + number.to_bytes(1 << power, "big") + content


edges = st.sampled_from([0, 1, 23, 24, 25, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1])


@given(
    st.lists(edges | edges.map(lambda number: -1 - number), max_size=30),
    st.sampled_from([0, 1, 23, 24, 255, 256, 65536]),
)
def test_cbor_has_the_shortest_heads(tokens: list[int], length: int) -> None:
    parent = b"p" * 32
    extra = b"x" * length
    expected = hashlib.sha256(cbor([parent, tokens, extra or None])).digest()
    assert sha256_cbor_block(parent, tokens, extra) == expected
