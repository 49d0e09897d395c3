"""Products with packed weights: y = x Wᵀ, where a program decodes a tile of W in registers."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pegboard_kernel_triton.experts import (
    MANY_ROWS,
    num_tiles,
    precision_of,
    rows_of_tile,
    tile_of,
)
from pegboard_kernel_triton.packed_form import Form, Packed

MAGIC = tl.constexpr(0x4B000000)
"""Bits of 2^23 as a float: what is put into the low bits is added to it, exactly."""


@triton.jit
def _plane(base, rows, start, width, BITS: tl.constexpr, TILE: tl.constexpr):
    """Return the bits of one plane, int32 [rows, TILE]. width: bytes of a row."""
    EACH: tl.constexpr = 8 // BITS
    at = start // EACH + tl.arange(0, TILE // EACH)[None, :]
    words = tl.load(base + rows * width + at, mask=at < width, other=0).to(tl.int32)
    shifts = (tl.arange(0, EACH) * BITS)[None, None, :]
    bits = (words[:, :, None] >> shifts) & ((1 << BITS) - 1)
    return bits.reshape(words.shape[0], TILE)


@triton.jit
def _codes(low, middle, high, rows, start, columns, BITS: tl.constexpr, TILE: tl.constexpr):
    """Return codes, int32 [rows, TILE], from planes. See `packed_form.PLANES`."""
    LOW: tl.constexpr = 4 if BITS > 4 else 2 if BITS >= 2 else 1
    REST: tl.constexpr = BITS - LOW
    codes = _plane(low, rows, start, tl.cdiv(columns * LOW, 8), LOW, TILE)
    if REST >= 2:
        codes |= _plane(middle, rows, start, tl.cdiv(columns * 2, 8), 2, TILE) << LOW
    if REST == 1:
        codes |= _plane(middle, rows, start, tl.cdiv(columns, 8), 1, TILE) << LOW
    if REST == 3:
        codes |= _plane(high, rows, start, tl.cdiv(columns, 8), 1, TILE) << (LOW + 2)
    return codes


@triton.jit
def _shifted(words, PLACES: tl.constexpr):
    """Return int32 numbers, shifted to the left, or to the right if PLACES is negative."""
    if PLACES >= 0:
        moved = words << PLACES
    else:
        moved = words >> (-PLACES)
    return moved


@triton.jit
def _floats(words, AT: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the floats of BITS bits whose first bit is bit AT of a word. Their bits become those
    of a float32 that is too small by the difference of the biases."""
    EXPONENT: tl.constexpr = BITS - 1 - MANTISSA
    LOWEST: tl.constexpr = 23 - MANTISSA
    UNIT: tl.constexpr = 2.0 ** (128 - (1 << (EXPONENT - 1)))
    sign = _shifted(words, 32 - BITS - AT) & -2147483648
    rest = _shifted(words, LOWEST - AT) & (((1 << (BITS - 1)) - 1) << LOWEST)
    return (sign | rest).to(tl.float32, bitcast=True) * UNIT


@triton.jit
def _numbers(
    codes,
    zero,
    table,
    AT: tl.constexpr,
    DECODING: tl.constexpr,
    BITS: tl.constexpr,
):
    """Return what the codes of BITS bits from bit AT of each word on stand for, in float32. zero:
    zero points, which integers are counted from."""
    if DECODING == "integer":
        PLACE: tl.constexpr = AT % 16
        UNIT: tl.constexpr = 1.0 / (1 << PLACE)
        part = _shifted(codes, PLACE - AT) & (((1 << BITS) - 1) << PLACE)
        numbers = (part | MAGIC).to(tl.float32, bitcast=True) * UNIT - (8388608.0 * UNIT + zero)
    elif DECODING == "e4m3":
        numbers = _floats(codes, AT, BITS, 3)
    elif DECODING == "e5m2":
        numbers = _floats(codes, AT, BITS, 2)
    elif DECODING == "e2m1":
        numbers = _floats(codes, AT, BITS, 1)
    else:
        numbers = tl.load(table + (_shifted(codes, -AT) & ((1 << BITS) - 1)))
    return numbers


@triton.jit
def _spread(
    base,
    rows,
    start,
    count,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Return the stored numbers of the blocks of TILE columns, [rows, TILE] or [rows, 1]. start: a
    multiple of TILE. count: blocks of a row. IS_WHOLE: no columns are beyond the last. If a tile
    has whole blocks, or is within one, each is read once."""
    if BLOCK % TILE == 0:
        block = start // BLOCK if IS_WHOLE else tl.minimum(start // BLOCK, count - 1)
        values = tl.load(base + rows * count + block)
    elif TILE % BLOCK == 0:
        at = start // BLOCK + tl.arange(0, TILE // BLOCK)[None, :]
        few = tl.load(base + rows * count + at, mask=at < count, other=0)
        wide = few[:, :, None].broadcast_to(few.shape[0], TILE // BLOCK, BLOCK)
        values = wide.reshape(few.shape[0], TILE)
    else:
        at = ((start + tl.arange(0, TILE)) // BLOCK)[None, :]
        values = tl.load(base + rows * count + at, mask=at < count, other=0)
    return values


@triton.jit
def _scale(stored, table, SCALES: tl.constexpr):
    """Return stored scales in float32."""
    if SCALES == "e4m3":
        codes = stored.to(tl.int32)
        finite = _floats(codes, 0, 8, 3)
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
def _add_columns(
    total,
    codes,
    x_rows,
    order,
    start,
    scale,
    shift,
    outer,
    outer_shift,
    table,
    scale_table,
    rows,
    columns,
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
    TILE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_LATE: tl.constexpr,
    AT: tl.constexpr,
):
    """Return total [tokens, rows] with the products of TILE of the columns, from `start` on. AT:
    where the codes are in their words. IS_LATE: all columns of a tile share a scale, so sums are
    multiplied with it instead of weights."""
    at = start + tl.arange(0, TILE)[None, :]
    place = at
    if HAS_ORDER:
        place = tl.load(order + at, mask=at < columns, other=0)
    if IS_WHOLE:
        values = tl.load(x_rows + place)
    else:
        values = tl.load(x_rows + place, mask=at < columns, other=0)
    blocks = tl.cdiv(columns, BLOCK)
    zero = ZERO + 128.0 if BITS == 8 else ZERO + 0.0
    if SHIFT == "zero":
        zero += _spread(shift, rows, start, blocks, BLOCK, TILE, IS_WHOLE).to(tl.float32)
    numbers = _numbers(codes, zero, table, AT, DECODING, BITS)
    stored = _spread(scale, rows, start, blocks, BLOCK, TILE, IS_WHOLE)
    factor = _scale(stored, scale_table, SCALES)
    if OUTER:
        number = _spread(outer, rows, start, tl.cdiv(columns, OUTER), OUTER, TILE, IS_WHOLE)
        factor = factor * number.to(tl.float32)
    factor += OFFSET
    if SHIFT == "minimum":
        if SCALES == "pair":
            minimum = (stored.to(tl.int32) >> 4).to(tl.float32)
        else:
            minimum = _spread(shift, rows, start, blocks, BLOCK, TILE, IS_WHOLE).to(tl.float32)
        if OUTER:
            number = _spread(
                outer_shift, rows, start, tl.cdiv(columns, OUTER), OUTER, TILE, IS_WHOLE
            )
            minimum = minimum * number.to(tl.float32)
    if IS_LATE:
        part = tl.dot(values, numbers.to(values.dtype).trans(), input_precision=PRECISION)
        total += part * factor.trans()
        if SHIFT == "minimum":
            total += tl.sum(values.to(tl.float32), 1)[:, None] * minimum.trans()
    else:
        weights = numbers * factor
        if SHIFT == "minimum":
            weights += minimum
        total = tl.dot(values, weights.to(values.dtype).trans(), total, input_precision=PRECISION)
    return total


@triton.jit
def _sums(
    total,
    x_rows,
    order,
    rows,
    low,
    middle,
    high,
    scale,
    shift,
    outer,
    outer_shift,
    table,
    scale_table,
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
    TILE: tl.constexpr,
    IN_WORDS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_LATE: tl.constexpr,
):
    """Return total [tokens, rows] with the products of all columns. x_rows: pointers to the tokens
    [tokens, 1]. rows: of W, int64 [rows, 1]."""
    STEP: tl.constexpr = TILE * 32 // BITS if IN_WORDS else TILE
    WIDTH: tl.constexpr = (COLUMNS + STEP - 1) // STEP * TILE
    for start in range(0, COLUMNS, STEP):
        if IN_WORDS:
            at = start * BITS // 32 + tl.arange(0, TILE)[None, :]
            codes = tl.load(low + rows * WIDTH + at)
        else:
            codes = _codes(low, middle, high, rows, start, COLUMNS, BITS, TILE)
        for part in tl.static_range(STEP // TILE):
            total = _add_columns(
                total,
                codes,
                x_rows,
                order,
                start + part * TILE,
                scale,
                shift,
                outer,
                outer_shift,
                table,
                scale_table,
                rows,
                COLUMNS,
                DECODING,
                BITS,
                BLOCK,
                SCALES,
                SHIFT,
                ZERO,
                OUTER,
                OFFSET,
                HAS_ORDER,
                PRECISION,
                TILE,
                IS_WHOLE,
                IS_LATE,
                part * BITS if IN_WORDS else 0,
            )
    return total


@triton.jit(do_not_specialize=["count", "num_experts"])
def _packed_product(
    x,
    order,
    low,
    middle,
    high,
    scale,
    shift,
    outer,
    outer_shift,
    table,
    scale_table,
    order_rows,
    bias,
    starts,
    out,
    count,
    num_experts,
    expert_rows,
    first_row,
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
    IN_WORDS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_LATE: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One program for each tile of tokens and ROWS rows of W. HAS_EXPERTS: tokens are sorted by
    expert (see `experts.tile_of`), each of which has `expert_rows` rows, of which `num_rows` from
    `first_row` on are computed. Tokens without an expert become zeros. order_rows: of each expert,
    in `order`. Otherwise there is one expert, which has all tokens.

    Programs that read the same rows follow each other. Places beyond the last token or row are
    computed as copies of it, so nothing in the loop needs a mask for them."""
    expert = tl.full([], 0, tl.int32)
    first = tl.program_id(0) * TOKENS
    stop = count
    if HAS_EXPERTS:
        expert, first, stop = tile_of(starts, tl.program_id(0), num_experts, TOKENS)
        if first >= count:
            return
    tokens = (first + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    is_token = (tokens < stop) & (tokens < count)
    places = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :]
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    if expert < num_experts:
        before = expert.to(tl.int64) * expert_rows + first_row
        rows = before + tl.minimum(places, num_rows - 1).reshape(ROWS, 1)
        x_rows = x + tl.minimum(tokens, count - 1) * x_stride
        columns = order
        if HAS_ORDER and HAS_EXPERTS:
            columns = order + tl.load(order_rows + expert) * COLUMNS
        total = _sums(
            total,
            x_rows,
            columns,
            rows,
            low,
            middle,
            high,
            scale,
            shift,
            outer,
            outer_shift,
            table,
            scale_table,
            COLUMNS,
            DECODING,
            BITS,
            BLOCK,
            SCALES,
            SHIFT,
            ZERO,
            OUTER,
            OFFSET,
            HAS_ORDER,
            PRECISION,
            TILE,
            IN_WORDS,
            IS_WHOLE,
            IS_LATE,
        )
        if HAS_BIAS:
            added = tl.load(bias + before + places, mask=places < num_rows, other=0)
            total += added.to(tl.float32)
    tl.store(
        out + tokens * out_stride + first_row + places,
        total.to(out.dtype.element_ty),
        mask=is_token & (places < num_rows),
    )


class Tiles(NamedTuple):
    """tokens, rows, columns: of a tile. warps, stages: of a program."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int


def choose_tiles(count: int, num_rows: int, columns: int, form: Form) -> Tiles:
    """Return the tiles of a product with this number of tokens. Few tokens: narrow tiles make more
    programs, which read W together. No card has measured these numbers."""
    width = form.words or min(128 if count <= 16 else 32, triton.next_power_of_2(columns))
    if count <= 16:
        return Tiles(16, 32 if num_rows <= 8192 else 64, width, 4, 4)
    return Tiles(64, 64 if count <= 64 else 128, width, 4, 2)


def arguments_of(packed: Packed) -> tuple[Tensor | None, ...]:
    """Return the pointers of `_sums`, in its order. Those that a form does not read are None."""
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


class Experts(NamedTuple):
    """Which rows of which matrix sorted tokens are multiplied with.

    starts: int32 [E + 1] (see `pegboard.ops.sort_by_expert`). size: rows of each expert. rows:
    those to compute, [start, stop). order_rows: int32 [E], the row of `order` of each expert; None
    = columns are in order. bias: [E, size].
    """

    starts: Tensor
    size: int
    rows: tuple[int, int]
    order_rows: Tensor | None
    bias: Tensor | None


def multiply(
    x: Tensor,
    packed: Packed,
    order: Tensor | None,
    out: Tensor,
    experts: Experts | None = None,
    is_invariant: bool = False,
) -> None:
    """Write the products of x [T, in] with packed rows to out [T, rows], which may be some columns
    of a wider tensor. With experts, out has the columns of all rows of an expert, and tokens
    without an expert become zeros. Nothing is read on the host.

    order: int32 [in], the column of x for each column of the codes, or [P, in] with experts; None =
    in order. Products are added in float32. If scales vary within a tile, W is rounded to the type
    of x. is_invariant: a token has the same bits in every step, because all steps have the same
    tiles, and one program adds up all columns of a tile, in their order.
    """
    count = len(x)
    if not count:
        return
    form = packed.form
    if experts is None:
        first_row = 0
        num_rows = len(packed.scale)
        tiles = choose_tiles(MANY_ROWS if is_invariant else count, num_rows, packed.columns, form)
        num_programs = triton.cdiv(count, tiles.tokens)
        of_experts: tuple[Tensor | None, ...] = (None, None, None)
        sizes = (1, num_rows)
    else:
        first_row, stop = experts.rows
        num_rows = stop - first_row
        num_experts = len(experts.starts) - 1
        tokens = MANY_ROWS if is_invariant else rows_of_tile(count, num_experts)
        tiles = choose_tiles(tokens, num_rows, packed.columns, form)
        num_programs = num_tiles(count, num_experts + 1, tiles.tokens)
        of_experts = (experts.order_rows, experts.bias, experts.starts)
        sizes = (num_experts, experts.size)
    _packed_product[num_programs, triton.cdiv(num_rows, tiles.rows)](
        x,
        order,
        *arguments_of(packed),
        *of_experts,
        out,
        count,
        *sizes,
        first_row,
        num_rows,
        x.stride(0),
        out.stride(0),
        **launch_options(form, packed.columns, order is not None, x.dtype, tiles),
        HAS_EXPERTS=experts is not None,
        HAS_BIAS=experts is not None and experts.bias is not None,
    )


@cache
def launch_options(
    form: Form, columns: int, has_order: bool, dtype: torch.dtype, tiles: Tiles
) -> dict[str, object]:
    """Return the constants and options of a launch. dtype: of what is multiplied."""
    step = tiles.columns * 32 // form.bits if form.words else tiles.columns
    return {
        "COLUMNS": columns,
        "DECODING": form.decoding,
        "BITS": form.bits,
        "BLOCK": form.block,
        "SCALES": form.scales,
        "SHIFT": form.shift,
        "ZERO": form.zero,
        "OUTER": form.outer,
        "OFFSET": form.scale_offset,
        "HAS_ORDER": has_order,
        "PRECISION": precision_of(dtype),
        "TOKENS": tiles.tokens,
        "ROWS": tiles.rows,
        "TILE": tiles.columns,
        "IN_WORDS": form.words > 0,
        "IS_WHOLE": columns % step == 0,
        "IS_LATE": tiles.tokens < 32
        and form.block % tiles.columns == 0
        and form.outer % tiles.columns == 0,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
