"""Decodes ggml blocks into `FloatCodes`: positions in a table of at most 16 floats, with a scale
for 16 or 32 columns.

Source of the layouts: ggml-common.h, as in `dequantize`. The IQ types below four bits store
positions in grids of vectors. The elements of all vectors of a type have few different sizes, so
each element fits in four bits. The grids are those of `gguf.quants`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pegboard.ops.float_codes import E2M1, FloatCodes, ScaleCodes
from pegboard_pack_gguf.ggml_types import BY_STORED

Array = np.ndarray
CHUNK_ELEMENTS = 1 << 18
"""The number of elements that are decoded at a time. Their codes and temporaries stay in the
second-level cache."""


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """The representation of a ggml type as `FloatCodes`. columns: how many share a scale. values:
    what the codes stand for. codes, scales: turn raw blocks uint8 [n, block_bytes] into uint8 [n,
    block size], and into [n, block size / columns], which are numbers, or the bytes of
    `scale_type`, or positions in the table `steps`, for scales that are steps[position] times
    `outer`: float16 [n, 1]."""

    columns: int
    values: tuple[float, ...]
    codes: Callable[[Array], Array]
    scales: Callable[[Array], Array]
    scale_type: torch.dtype | None = None
    steps: tuple[float, ...] = ()
    outer: Callable[[Array], Array] | None = None


def is_codes(stored: str) -> bool:
    """True if `float_codes` knows this type."""
    return stored in CODE_FORMATS


def codes_width(stored: str) -> int:
    """Return the number of columns that ranks cannot divide: those with a scale in common, of
    either level."""
    form = CODE_FORMATS[stored]
    return form.columns if form.outer is None else BY_STORED[stored].block_size


def float_codes(
    data: memoryview, stored: str, shape: tuple[int, ...], factor: float = 1.0
) -> FloatCodes:
    """Decode blocks. `data` holds the blocks of the type `stored` for `shape` [rows, columns], row
    by row. factor: see `FloatCodes`. The results are in new memory."""
    known = BY_STORED[stored]
    form = CODE_FORMATS[stored]
    rows, columns = shape
    blocks = np.frombuffer(data, np.uint8).reshape(-1, known.block_bytes)
    assert len(blocks) * known.block_size == rows * columns, (len(blocks), stored, shape)
    codes = np.empty((len(blocks), known.block_size), np.uint8)
    step = CHUNK_ELEMENTS // known.block_size
    with np.errstate(invalid="ignore", over="ignore"):  # in blocks that no converter writes
        for start in range(0, len(blocks), step):
            codes[start : start + step] = form.codes(blocks[start : start + step])
    stored_scales = torch.from_numpy(form.scales(blocks).copy()).view(rows, -1)
    scales: torch.Tensor | ScaleCodes = (
        stored_scales if form.scale_type is None else stored_scales.view(form.scale_type)
    )
    if form.outer is not None:
        scales = ScaleCodes(
            stored_scales,
            torch.tensor(form.steps),
            torch.from_numpy(form.outer(blocks).copy()).view(rows, -1),
        )
    return FloatCodes(
        torch.from_numpy(codes.reshape(rows, columns)),
        torch.tensor(form.values),
        scales,
        (1, form.columns),
        factor,
    )


def _half(blocks: Array, at: int) -> Array:
    """Returns the float16 number at byte `at` of each block: float16 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _words(blocks: Array, start: int, stop: int, kind: type[np.unsignedinteger]) -> Array:
    return np.ascontiguousarray(blocks[:, start:stop]).view(kind)


def _nibbles(start: int, stop: int, run: int) -> Callable[[Array], Array]:
    """Splits runs of `run` bytes, each into its low halves and then its high halves."""

    def split(blocks: Array) -> Array:
        packed = blocks[:, start:stop].reshape(len(blocks), -1, run)
        return np.stack((packed & 15, packed >> 4), axis=2).reshape(len(blocks), -1)

    return split


def _halves_of(packed: Array) -> Array:
    """Splits each byte: [n, k] → [n, 2k], low half first."""
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1)


def _iq4_xs_scales(blocks: Array) -> Array:
    """Six bits per scale, minus 32: four in nibbles, and two in a word of all eight."""
    low = _halves_of(blocks[:, 4:8])
    high = _words(blocks, 2, 4, np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    return low | high.astype(np.uint8) << 4


def _nvfp4_scales(blocks: Array) -> Array:
    """E4M3 without sign. The code that would be NaN means 0."""
    scales = blocks[:, :4] & 0x7F
    return np.where(scales == 0x7F, np.uint8(0), scales)


@functools.cache
def _vectors(name: str) -> Array:
    """Returns the grid of a type, with codes instead of elements, one vector per number: uint32 or
    uint64 [vectors]."""
    import gguf

    kind = getattr(gguf.quants, name)
    kind.init_grid()
    sizes = np.array(SIZES[name])
    codes = np.searchsorted(sizes, kind.grid.reshape(-1, kind.grid_shape[1])).astype(np.uint8)
    assert np.array_equal(sizes[codes], kind.grid.reshape(codes.shape))
    return codes.view(np.uint64 if codes.shape[1] == 8 else np.uint32).ravel()


def _looked_up(name: str, positions: Array, flags: Array) -> Array:
    """Returns the codes of the vectors at these positions [n, vectors]. flags [n, 32]: bit i sets
    `FLAG` in element i."""
    vectors = _vectors(name)[positions].view(np.uint64) | FLAGS[flags]
    return vectors.view(np.uint8).reshape(len(positions), -1)


def _bits(packed: Array, width: int, count: int) -> Array:
    """Splits numbers into `count` numbers of `width` bits, lowest first: [n, k] → [n, k *
    count]."""
    shifts = np.arange(0, width * count, width).astype(packed.dtype)
    return (packed[:, :, None] >> shifts & packed.dtype.type((1 << width) - 1)).reshape(
        len(packed), -1
    )


def _position(low: Array, high: Array) -> Array:
    """Returns positions in a grid: the lowest eight bits and the bits above them."""
    return low | high.astype(np.uint16) << 8


def _iq2_xxs(blocks: Array) -> Array:
    """Eight times four positions, and then four signs of seven bits and four bits of a scale."""
    words = _words(blocks, 2, 66, np.uint32).reshape(-1, 8, 2)
    positions = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    return _looked_up("IQ2_XXS", positions, SIGNS[_bits(words[:, :, 1], 7, 4)])


def _iq2_xs(blocks: Array) -> Array:
    words = _words(blocks, 2, 66, np.uint16)
    return _looked_up("IQ2_XS", words & 511, SIGNS[words >> 9])


def _iq2_s(blocks: Array) -> Array:
    return _looked_up(
        "IQ2_S", _position(blocks[:, 2:34], _bits(blocks[:, 66:74], 2, 4)), blocks[:, 34:66]
    )


def _iq3_xxs(blocks: Array) -> Array:
    return _looked_up(
        "IQ3_XXS", blocks[:, 2:66], SIGNS[_bits(_words(blocks, 66, 98, np.uint32), 7, 4)]
    )


def _iq3_s(blocks: Array) -> Array:
    return _looked_up(
        "IQ3_S", _position(blocks[:, 2:66], _bits(blocks[:, 66:74], 1, 8)), blocks[:, 74:106]
    )


def _iq1_s(blocks: Array) -> Array:
    """The flag of an element is the sign of its offset. Here 32 elements have the same."""
    words = _words(blocks, 34, 50, np.uint16)
    flags = np.repeat((words >> 15).astype(np.uint8) * np.uint8(255), 4, axis=1)
    return _looked_up("IQ1_S", _position(blocks[:, 2:34], _bits(words, 3, 4)), flags)


def _iq1_m(blocks: Array) -> Array:
    """As in IQ1_S, with one sign per eight elements."""
    nibbles = _halves_of(blocks[:, 32:48])
    return _looked_up(
        "IQ1_M", _position(blocks[:, :32], nibbles & 7), (nibbles >> 3) * np.uint8(255)
    )


def _iq1_m_scales(blocks: Array) -> Array:
    return _bits(_words(blocks, 48, 56, np.uint16), 3, 4).astype(np.uint8)


def _iq1_m_outer(blocks: Array) -> Array:
    """The scale of the block is in the upper four bits of four words."""
    words = _words(blocks, 48, 56, np.uint16)
    return (
        words[:, :1] >> 12
        | words[:, 1:2] >> 8 & 0xF0
        | words[:, 2:3] >> 4 & 0xF00
        | words[:, 3:] & 0xF000
    ).view(np.float16)


def _two_levels(
    columns: int,
    values: tuple[float, ...],
    codes: Callable[[Array], Array],
    scales: Callable[[Array], Array],
    steps: tuple[float, ...],
    outer: Callable[[Array], Array] = lambda blocks: _half(blocks, 0),
) -> CodeFormat:
    return CodeFormat(columns, values, codes, scales, steps=steps, outer=outer)


def _steps(count: int, step: float, first: float) -> tuple[float, ...]:
    return tuple(first + step * position for position in range(count))


def _values(sizes: Sequence[float], flagged: Sequence[float]) -> tuple[float, ...]:
    """Returns a table: what codes stand for without and with `FLAG`."""
    unused = (0.0,) * (FLAG - len(sizes))
    return (*sizes, *unused, *flagged, *unused)


FLAG = 8
"""The bit of a code that says that an element is negative, or for the IQ1 types, that its offset
is."""
FLAGS = np.array(
    [sum(FLAG << 8 * bit for bit in range(8) if byte >> bit & 1) for byte in range(256)], np.uint64
)
"""FLAG in byte i where bit i is set."""
SIGNS = np.array([bits | bits.bit_count() % 2 << 7 for bits in range(128)], np.uint8)
"""Signs that are stored in seven bits: the eighth makes their number even."""
IQ2_SIZES = (8.0, 25.0, 43.0)
IQ3_XXS_SIZES = (4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0)
IQ3_S_SIZES = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0)
IQ1_SIZES = (-1.0, 0.0, 1.0)
SIZES = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), IQ2_SIZES),
    "IQ3_XXS": IQ3_XXS_SIZES,
    "IQ3_S": IQ3_S_SIZES,
    "IQ1_S": IQ1_SIZES,
    "IQ1_M": IQ1_SIZES,
}
"""The elements of each grid, smallest first."""
OFFSET = 0.125
IQ4 = (
    -127.0,
    -104.0,
    -83.0,
    -65.0,
    -49.0,
    -35.0,
    -22.0,
    -10.0,
    1.0,
    13.0,
    25.0,
    38.0,
    53.0,
    69.0,
    89.0,
    113.0,
)
IQ2, IQ3_XXS, IQ3_S = (
    _values(sizes, [-size for size in sizes]) for sizes in (IQ2_SIZES, IQ3_XXS_SIZES, IQ3_S_SIZES)
)
IQ1 = _values([size + OFFSET for size in IQ1_SIZES], [size - OFFSET for size in IQ1_SIZES])
MXFP4 = tuple(E2M1.tolist())

CODE_FORMATS = {
    "IQ4_NL": CodeFormat(32, IQ4, _nibbles(2, 18, 16), lambda blocks: _half(blocks, 0)),
    "IQ4_XS": _two_levels(32, IQ4, _nibbles(8, 136, 16), _iq4_xs_scales, _steps(64, 1.0, -32.0)),
    "MXFP4": CodeFormat(
        32, MXFP4, _nibbles(1, 17, 16), lambda blocks: blocks[:, :1], torch.float8_e8m0fnu
    ),
    "NVFP4": CodeFormat(16, MXFP4, _nibbles(4, 36, 8), _nvfp4_scales, torch.float8_e4m3fn),
    "IQ2_XXS": _two_levels(
        32, IQ2, _iq2_xxs, lambda blocks: blocks[:, 9:66:8] >> 4, _steps(16, 0.25, 0.125)
    ),
    "IQ2_XS": _two_levels(
        16, IQ2, _iq2_xs, lambda blocks: _halves_of(blocks[:, 66:]), _steps(16, 0.25, 0.125)
    ),
    "IQ2_S": _two_levels(
        16, IQ2, _iq2_s, lambda blocks: _halves_of(blocks[:, 74:]), _steps(16, 0.25, 0.125)
    ),
    "IQ3_XXS": _two_levels(
        32, IQ3_XXS, _iq3_xxs, lambda blocks: blocks[:, 69:98:4] >> 4, _steps(16, 0.5, 0.25)
    ),
    "IQ3_S": _two_levels(
        32, IQ3_S, _iq3_s, lambda blocks: _halves_of(blocks[:, 106:]), _steps(16, 2.0, 1.0)
    ),
    "IQ1_S": _two_levels(
        32, IQ1, _iq1_s, lambda blocks: blocks[:, 35:50:2] >> 4 & 7, _steps(8, 2.0, 1.0)
    ),
    "IQ1_M": _two_levels(16, IQ1, _iq1_m, _iq1_m_scales, _steps(8, 2.0, 1.0), _iq1_m_outer),
}
"""The forms by stored type. Every code takes four bits."""
