"""Decodes ggml blocks into `Blocks`: the stored integers with their scales, which may be integers
with a scale of their own.

Source of the layouts: ggml-common.h, as in `dequantize`. A decoder gets raw blocks [n] as a
structured array and fills `codes` [n, block size of the type] and `scales` [n, 1 or 2, blocks of
the form]: scale, then minimum. It works on as many blocks at a time as fit the cache, in runs of 16
bytes that numpy moves as one item.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pegboard.ops.blocks import Blocks
from pegboard_pack_gguf.ggml_types import BY_STORED

Array = np.ndarray
CHUNK_ELEMENTS = 1 << 18
"""The number of elements that are decoded at a time. Their codes and temporaries stay in the
second-level cache."""


@dataclass(frozen=True, slots=True)
class Format:
    """The representation of a ggml type as `Blocks`. fields: the fields of one stored block.
    scale_dtype: of the scales and minimums of a block; integers are multiplied with the block's
    `scales` in float16, of which the second is subtracted."""

    fields: np.dtype
    fill: Callable[[Array, Array, Array], None]
    bits: int
    scale_dtype: type[np.number]
    has_minimum: bool = False
    block_size: int = 32
    zero: int = 0


def is_decodable(stored: str) -> bool:
    """True if `decode` knows this type."""
    return stored in FORMATS


def blocks_width(stored: str) -> int:
    """Return the number of columns that ranks cannot divide: those with a scale in common, of
    either level."""
    form = FORMATS[stored]
    is_nested = issubclass(form.scale_dtype, np.integer)
    return BY_STORED[stored].block_size if is_nested else form.block_size


def decode(data: memoryview, stored: str, shape: tuple[int, ...]) -> Blocks:
    """Decode blocks. `data` holds the blocks of the type `stored` for `shape` [rows, columns], row
    by row. The results are in new memory."""
    known = BY_STORED[stored]
    form = FORMATS[stored]
    rows, columns = shape
    blocks = np.frombuffer(data, form.fields)
    assert len(blocks) * known.block_size == rows * columns, (len(blocks), stored, shape)
    codes = np.empty((len(blocks), known.block_size), np.int8 if form.bits == 8 else np.uint8)
    scales = np.empty(
        (1 + form.has_minimum, len(blocks), known.block_size // form.block_size), form.scale_dtype
    )
    by_block = scales.swapaxes(0, 1)
    step = CHUNK_ELEMENTS // known.block_size
    for start in range(0, len(blocks), step):
        cut = slice(start, start + step)
        form.fill(blocks[cut], codes[cut], by_block[cut])
    parts = torch.from_numpy(scales.reshape(1 + form.has_minimum, rows, -1))
    minimum = parts[1] if form.has_minimum else None
    outer = _outer(blocks["scales"], rows) if issubclass(form.scale_dtype, np.integer) else None
    return Blocks(
        form.bits,
        form.block_size,
        torch.from_numpy(codes.reshape(rows, columns)),
        parts[0],
        minimum,
        form.zero,
        outer=outer,
    )


def _outer(scales: Array, rows: int) -> torch.Tensor:
    """Returns the second level of scales: float16 [n, 1 or 2] → [1 or 2, rows, n / rows]. A second
    one was to be subtracted."""
    outer = torch.from_numpy(scales.T.reshape(scales.shape[1], rows, -1).copy())
    outer[1:] *= -1
    return outer


def _runs(codes: Array) -> Array:
    """Returns codes as runs of 16 bytes: [n, 16 k] → [n, k]. numpy moves each run as one item."""
    return codes.view("V16")


def _nibbles(packed: Array, codes: Array) -> None:
    """Splits n times k runs of 16 bytes: first all low halves, then all high halves: packed [n, k]
    → codes [n, 2, k] runs."""
    words = np.ascontiguousarray(packed).view(np.uint64)
    mask = np.uint64(0x0F0F0F0F0F0F0F0F)
    codes[:, 0] = (words & mask).view("V16").reshape(packed.shape)
    codes[:, 1] = ((words >> np.uint64(4)) & mask).view("V16").reshape(packed.shape)


def _q4(blocks: Array, codes: Array, scales: Array) -> None:
    _nibbles(blocks["codes"][:, None], _runs(codes).reshape(-1, 2, 1))
    scales[:, :, 0] = blocks["scales"]


def _q5(blocks: Array, codes: Array, scales: Array) -> None:
    """Decodes the low halves, and adds the bits 0…31 of `high` as fifth bits."""
    _q4(blocks, codes, scales)
    high = np.unpackbits(np.ascontiguousarray(blocks["high"]), axis=1, bitorder="little")
    codes |= high << 4


def _q8_0(blocks: Array, codes: Array, scales: Array) -> None:
    _runs(codes)[:] = blocks["codes"]
    scales[:, :, 0] = blocks["scales"]


def _k_scales(blocks: Array, scales: Array) -> None:
    """Splits eight scales and eight minima of six bits, which are stored in twelve bytes. The first
    four of each are in the low bits of bytes 0-3 and 4-7. The last four take four bits from bytes
    8-11 and their top two from bytes 0-3 and 4-7."""
    first, second, third = blocks["packed"].reshape(-1, 3, 4).swapaxes(0, 1)
    scales[:, 0, :4] = first & 63
    scales[:, 0, 4:] = (third & 15) | ((first >> 2) & 48)
    scales[:, 1, :4] = second & 63
    scales[:, 1, 4:] = (third >> 4) | ((second >> 2) & 48)


def _q4_k(blocks: Array, codes: Array, scales: Array) -> None:
    """Decodes four runs of 32 bytes, each with 32 low halves and then 32 high halves."""
    _nibbles(np.ascontiguousarray(blocks["codes"]).reshape(-1, 2), _runs(codes).reshape(-1, 2, 2))
    _k_scales(blocks, scales)


def _q5_k(blocks: Array, codes: Array, scales: Array) -> None:
    """Bit g of byte i of `high` is the fifth bit of element i of the g-th group of 32."""
    _q4_k(blocks, codes, scales)
    high = np.ascontiguousarray(blocks["high"])
    by_32 = codes.reshape(-1, 8, 32)
    for group in range(8):
        by_32[:, group] |= ((high >> group) & 1) << 4


def _q6_k(blocks: Array, codes: Array, scales: Array) -> None:
    """Decodes two runs of 64 bytes (low halves, then high halves), and two runs of 32 bytes with
    the upper two bits of four times 32."""
    _nibbles(np.ascontiguousarray(blocks["codes"]).reshape(-1, 4), _runs(codes).reshape(-1, 2, 4))
    high = np.ascontiguousarray(blocks["high"]).reshape(-1, 32)
    by_128 = codes.reshape(-1, 4, 32)
    for group in range(4):
        by_128[:, group] |= ((high >> (2 * group)) & 3) << 4
    scales[:, 0] = blocks["packed"]


def _two_bits(packed: Array) -> Array:
    """Splits two runs of 32 bytes, each with four times 32 codes of two bits: V16 [n, 4] → uint8
    [n, 2, 4, 32]."""
    runs = np.ascontiguousarray(packed).view(np.uint8).reshape(-1, 2, 1, 32)
    return runs >> np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1) & 3


def _q2_k(blocks: Array, codes: Array, scales: Array) -> None:
    """The scales of 16 columns are as `Blocks` takes them: a minimum in the upper four bits of a
    byte."""
    codes[:] = _two_bits(blocks["codes"]).reshape(len(blocks), -1)
    scales[:, 0] = blocks["packed"]


def _q3_k(blocks: Array, codes: Array, scales: Array) -> None:
    """Bit g of byte i of `high` is the third bit of element i of the g-th group of 32. Sixteen
    scales of six bits are stored plus 32: the low four bits in eight bytes, and the upper two in
    four."""
    high = (
        np.ascontiguousarray(blocks["high"])[:, None] >> np.arange(8, dtype=np.uint8).reshape(8, 1)
        & 1
    )
    codes[:] = (_two_bits(blocks["codes"]).reshape(-1, 8, 32) | high << 2).reshape(len(blocks), -1)
    low = blocks["packed"][:, :8]
    top = blocks["packed"][:, None, 8:]
    upper = (top >> np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1) & 3).reshape(len(blocks), -1)
    scales[:, 0] = (np.concatenate((low & 15, low >> 4), 1) | upper << 4).astype(np.int8) - np.int8(
        32
    )


def _q8_k(blocks: Array, codes: Array, scales: Array) -> None:
    _runs(codes)[:] = blocks["codes"]
    scales[:, 0] = blocks["scales"]


def _q1_0(blocks: Array, codes: Array, scales: Array) -> None:
    """Bit i of the block is 1 for +scale and 0 for -scale, here as the codes 2 and 0."""
    codes[:] = np.unpackbits(np.ascontiguousarray(blocks["bits"]), axis=1, bitorder="little") << 1
    scales[:, 0] = blocks["scales"]


def _tq1_0(blocks: Array, codes: Array, scales: Array) -> None:
    """A byte holds five digits of base three as a fraction of 256: times 3**i, its upper part is
    digit i. Bytes come in runs of 32, 16 and 4; the last run holds four digits per byte."""
    at = 0
    for name, digits in (("first", 5), ("second", 5), ("last", 4)):
        packed = np.ascontiguousarray(blocks[name])[:, None, :]
        fractions = packed * (3 ** np.arange(digits)).astype(np.uint8)[:, None]
        values = (fractions.astype(np.uint16) * 3 >> 8).reshape(len(blocks), -1)
        codes[:, at : at + values.shape[1]] = values
        at += values.shape[1]
    scales[:, 0] = blocks["scales"]


def _tq2_0(blocks: Array, codes: Array, scales: Array) -> None:
    codes[:] = _two_bits(blocks["codes"]).reshape(len(blocks), -1)
    scales[:, 0] = blocks["scales"]


def _fields(*fields: tuple[str, str, int]) -> np.dtype:
    return np.dtype(
        [
            (name, kind, (count,)) if count > 1 or name == "scales" else (name, kind)
            for name, kind, count in fields
        ]
    )


SCALE = ("scales", "<f2", 1)
SCALE_AND_MINIMUM = ("scales", "<f2", 2)
RUN = ("codes", "V16", 1)
PACKED = ("packed", "u1", 12)
RUNS_OF_DIGITS = (("first", "u1", 32), ("second", "u1", 16), ("last", "u1", 4))
FORMATS = {
    "Q4_0": Format(_fields(SCALE, RUN), _q4, 4, np.float16, zero=8),
    "Q4_1": Format(_fields(SCALE_AND_MINIMUM, RUN), _q4, 4, np.float16, has_minimum=True),
    "Q5_0": Format(_fields(SCALE, ("high", "u1", 4), RUN), _q5, 5, np.float16, zero=16),
    "Q5_1": Format(
        _fields(SCALE_AND_MINIMUM, ("high", "u1", 4), RUN), _q5, 5, np.float16, has_minimum=True
    ),
    "Q8_0": Format(_fields(SCALE, ("codes", "V16", 2)), _q8_0, 8, np.float16),
    "Q2_K": Format(
        _fields(("packed", "u1", 16), ("codes", "V16", 4), SCALE_AND_MINIMUM),
        _q2_k,
        2,
        np.uint8,
        block_size=16,
    ),
    "Q3_K": Format(
        _fields(("high", "u1", 32), ("codes", "V16", 4), PACKED, SCALE),
        _q3_k,
        3,
        np.int8,
        block_size=16,
        zero=4,
    ),
    "Q4_K": Format(
        _fields(SCALE_AND_MINIMUM, PACKED, ("codes", "V16", 8)), _q4_k, 4, np.int8, has_minimum=True
    ),
    "Q5_K": Format(
        _fields(SCALE_AND_MINIMUM, PACKED, ("high", "u1", 32), ("codes", "V16", 8)),
        _q5_k,
        5,
        np.int8,
        has_minimum=True,
    ),
    "Q6_K": Format(
        _fields(("codes", "V16", 8), ("high", "u1", 64), ("packed", "i1", 16), SCALE),
        _q6_k,
        6,
        np.int8,
        block_size=16,
        zero=32,
    ),
    "Q8_K": Format(
        _fields(("scales", "<f4", 1), ("codes", "V16", 16), ("sums", "<i2", 16)),
        _q8_k,
        8,
        np.float32,
        block_size=256,
    ),
    "Q1_0": Format(
        _fields(SCALE, ("bits", "u1", 16)), _q1_0, 2, np.float16, block_size=128, zero=1
    ),
    "TQ1_0": Format(
        _fields(("first", "u1", 32), ("second", "u1", 16), ("last", "u1", 4), SCALE),
        _tq1_0,
        2,
        np.float16,
        block_size=256,
        zero=1,
    ),
    "TQ2_0": Format(
        _fields(("codes", "V16", 4), SCALE), _tq2_0, 2, np.float16, block_size=256, zero=1
    ),
}
"""The forms by stored type."""
