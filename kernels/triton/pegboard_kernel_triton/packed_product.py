"""Products with packed weights: y = x Wᵀ, where a program decodes a tile of W in registers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pegboard_kernel_triton.packed_form import PLANES, Packed


@triton.jit
def _plane(base, rows, is_row, start, width, BITS: tl.constexpr, TILE: tl.constexpr):
    """Return the bits of one plane, int32 [rows, TILE]. width: bytes of a row."""
    EACH: tl.constexpr = 8 // BITS
    at = start // EACH + tl.arange(0, TILE // EACH)[None, :]
    words = tl.load(base + rows * width + at, mask=is_row & (at < width), other=0).to(tl.int32)
    if EACH > 1:
        shifts = (tl.arange(0, EACH) * BITS)[None, None, :]
        bits = (words[:, :, None] >> shifts) & ((1 << BITS) - 1)
        words = bits.reshape(words.shape[0], TILE)
    return words


@triton.jit
def _codes(low, middle, high, rows, is_row, start, columns, BITS: tl.constexpr, TILE: tl.constexpr):
    """Return codes, int32 [rows, TILE]. See `packed_form.PLANES`."""
    LOW: tl.constexpr = 8 if BITS == 8 else 4 if BITS >= 4 else 2 if BITS >= 2 else 1
    REST: tl.constexpr = BITS - LOW
    codes = _plane(low, rows, is_row, start, tl.cdiv(columns * LOW, 8), LOW, TILE)
    if REST >= 2:
        width = tl.cdiv(columns * 2, 8)
        codes |= _plane(middle, rows, is_row, start, width, 2, TILE) << LOW
    if REST == 1:
        codes |= _plane(middle, rows, is_row, start, tl.cdiv(columns, 8), 1, TILE) << LOW
    if REST == 3:
        codes |= _plane(high, rows, is_row, start, tl.cdiv(columns, 8), 1, TILE) << (LOW + 2)
    return codes


@triton.jit
def _half(bits):
    """Return the float16 numbers of these bits, in float32."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _numbers(codes, table, DECODING: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr):
    """Return what codes stand for, in float32."""
    if DECODING == "integer":
        signed = codes
        if BITS == 8:
            signed = (codes ^ 128) - 128
        numbers = (signed - ZERO).to(tl.float32)
    elif DECODING == "table":
        numbers = tl.load(table + codes)
    elif DECODING == "e4m3":
        numbers = _half(((codes & 0x80) << 8) | ((codes & 0x7F) << 7))
    elif DECODING == "e2m1":
        numbers = _half(((codes & 8) << 12) | ((codes & 7) << 9))
    else:
        numbers = _half(codes << 8)
    return numbers


@triton.jit
def _spread(base, rows, is_row, start, count, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the stored numbers of the blocks of TILE columns, [rows, TILE] or [rows, 1]. count:
    blocks of a row. If a tile has whole blocks, or is within one, each is read once."""
    if BLOCK % TILE == 0:
        values = tl.load(base + rows * count + start // BLOCK, mask=is_row, other=0)
    elif TILE % BLOCK == 0:
        at = start // BLOCK + tl.arange(0, TILE // BLOCK)[None, :]
        few = tl.load(base + rows * count + at, mask=is_row & (at < count), other=0)
        wide = few[:, :, None].broadcast_to(few.shape[0], TILE // BLOCK, BLOCK)
        values = wide.reshape(few.shape[0], TILE)
    else:
        at = ((start + tl.arange(0, TILE)) // BLOCK)[None, :]
        values = tl.load(base + rows * count + at, mask=is_row & (at < count), other=0)
    return values


@triton.jit
def _scale(stored, table, SCALES: tl.constexpr):
    """Return stored scales in float32."""
    if SCALES == "e4m3":
        codes = stored.to(tl.int32)
        finite = _half(((codes & 0x80) << 8) | ((codes & 0x7F) << 7)) * 256.0
        number = tl.where((codes & 0x7F) == 0x7F, float("nan"), finite)
    elif SCALES == "e8m0":
        codes = stored.to(tl.int32)
        bits = tl.where(codes == 0, 0x400000, tl.where(codes == 255, 0x7FC00000, codes << 23))
        number = bits.to(tl.float32, bitcast=True)
    elif SCALES == "table":
        number = tl.load(table + stored.to(tl.int32))
    elif SCALES == "pair":
        number = (stored.to(tl.int32) & 15).to(tl.float32)
    else:
        number = stored.to(tl.float32)
    return number


@triton.jit
def _weights(
    low,
    middle,
    high,
    scale,
    shift,
    outer,
    outer_shift,
    table,
    scale_table,
    rows,
    is_row,
    start,
    columns,
    DECODING: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
    SHIFT: tl.constexpr,
    ZERO: tl.constexpr,
    OUTER: tl.constexpr,
    OFFSET: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the weights of some rows and of TILE columns from `start` on, float32 [rows, TILE].
    rows: int64 [rows, 1]. Columns beyond the last have no meaning, but are finite if scales are."""
    blocks = tl.cdiv(columns, BLOCK)
    codes = _codes(low, middle, high, rows, is_row, start, columns, BITS, TILE)
    numbers = _numbers(codes, table, DECODING, BITS, ZERO)
    stored = _spread(scale, rows, is_row, start, blocks, BLOCK, TILE)
    factor = _scale(stored, scale_table, SCALES)
    if OUTER:
        number = _spread(outer, rows, is_row, start, tl.cdiv(columns, OUTER), OUTER, TILE)
        factor = factor * number.to(tl.float32)
    if SHIFT == "zero":
        zero = _spread(shift, rows, is_row, start, blocks, BLOCK, TILE)
        numbers -= zero.to(tl.float32)
    weights = numbers * (factor + OFFSET)
    if SHIFT == "minimum":
        if SCALES == "pair":
            minimum = (stored.to(tl.int32) >> 4).to(tl.float32)
        else:
            minimum = _spread(shift, rows, is_row, start, blocks, BLOCK, TILE).to(tl.float32)
        if OUTER:
            number = _spread(outer_shift, rows, is_row, start, tl.cdiv(columns, OUTER), OUTER, TILE)
            minimum = minimum * number.to(tl.float32)
        weights += minimum
    return weights


@triton.jit(do_not_specialize=["count"])
def _packed_product(
    x,
    low,
    middle,
    high,
    scale,
    shift,
    outer,
    outer_shift,
    table,
    scale_table,
    order,
    out,
    count,
    num_rows,
    x_stride,
    out_stride,
    COLUMNS: tl.constexpr,
    DECODING: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
    SHIFT: tl.constexpr,
    ZERO: tl.constexpr,
    OUTER: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program for each TOKENS tokens and ROWS rows of W. Programs that read the same rows
    follow each other."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    is_token = tokens < count
    is_row = rows < num_rows
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(0, COLUMNS, TILE):
        weights = _weights(
            low,
            middle,
            high,
            scale,
            shift,
            outer,
            outer_shift,
            table,
            scale_table,
            rows,
            is_row,
            start,
            COLUMNS,
            DECODING,
            BITS,
            BLOCK,
            SCALES,
            SHIFT,
            ZERO,
            OUTER,
            OFFSET,
            TILE,
        )
        at = start + tl.arange(0, TILE)[None, :]
        is_column = at < COLUMNS
        place = at
        if HAS_ORDER:
            place = tl.load(order + at, mask=is_column, other=0)
        values = tl.load(x + tokens * x_stride + place, mask=is_token & is_column, other=0)
        weights = tl.where(is_column, weights, 0.0).to(values.dtype)
        total = tl.dot(values, weights.trans(), total, input_precision=PRECISION)
    places = out + tokens * out_stride + rows.reshape(1, ROWS)
    tl.store(
        places, total.to(out.dtype.element_ty), mask=is_token & (rows.reshape(1, ROWS) < num_rows)
    )


class Tiles(NamedTuple):
    """tokens, rows, columns: of a tile. warps, stages: of a program."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int


def choose_tiles(count: int, num_rows: int, columns: int) -> Tiles:
    """Return the tiles of a product with this number of tokens. Few tokens: narrow tiles make more
    programs, which read W together. No card has measured these numbers."""
    width = min(128, max(16, triton.next_power_of_2(columns)))
    if count <= 16:
        return Tiles(16, 32 if num_rows <= 8192 else 64, width, 4, 4)
    if count <= 64:
        return Tiles(64, 64, min(width, 64), 4, 3)
    return Tiles(128, 128, min(width, 32), 8, 3)


def arguments_of(packed: Packed) -> tuple[Tensor | None, ...]:
    """Return the pointers of `_weights`, in its order. Those that a form does not read are None."""
    planes = (*packed.planes, None, None)[:3]
    outer = packed.outer
    return (
        *planes,
        packed.scale,
        packed.shift,
        None if outer is None else outer[0],
        None if outer is None or len(outer) == 1 else outer[1],
        packed.table,
        packed.scale_table,
    )


def constants_of(packed: Packed) -> dict[str, object]:
    """Return the constants that a kernel is compiled with for this form."""
    form = packed.form
    assert len(packed.planes) == len(PLANES[form.bits])
    return {
        "DECODING": form.decoding,
        "BITS": form.bits,
        "BLOCK": form.block,
        "SCALES": form.scales,
        "SHIFT": form.shift,
        "ZERO": form.zero,
        "OUTER": form.outer,
        "OFFSET": form.scale_offset,
    }


def precision_of(dtype: torch.dtype) -> str:
    """Return how a kernel multiplies numbers of this type: float32 is not rounded."""
    return "ieee" if dtype == torch.float32 else "tf32"


def multiply(x: Tensor, packed: Packed, order: Tensor | None, out: Tensor) -> None:
    """Write x [T, in] times the transpose of packed rows to out [T, rows], which may be some
    columns of a wider tensor.

    order: int32 [in], the column of x for each column of the codes; None = in order. W is rounded
    to the type of x. Products are added in float32.
    """
    count = len(x)
    num_rows = len(packed.scale)
    if not count:
        return
    tiles = choose_tiles(count, num_rows, packed.columns)
    grid = (triton.cdiv(count, tiles.tokens), triton.cdiv(num_rows, tiles.rows))
    _packed_product[grid](
        x,
        *arguments_of(packed),
        order,
        out,
        count,
        num_rows,
        x.stride(0),
        out.stride(0),
        COLUMNS=packed.columns,
        **constants_of(packed),
        HAS_ORDER=order is not None,
        PRECISION=precision_of(x.dtype),
        TOKENS=tiles.tokens,
        ROWS=tiles.rows,
        TILE=tiles.columns,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
