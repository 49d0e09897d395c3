"""Products of activations and weights that are both codes of 8 bits (W8A8): integers, or e4m3."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from pegboard.ops.rounding import LARGEST, Rounding
from pegboard_kernel_triton.experts import MANY_ROWS
from pegboard_kernel_triton.packed_form import Packed

STEP = 128
"""Columns whose products are added before they are multiplied with scales."""
ROUNDED = 1024
"""Columns that a program rounds at a time."""
DECODINGS = {"int8": "integer", "float8_e4m3fn": "e4m3"}
LEAST = {"int8": (8, 0), "float8_e4m3fn": (8, 9)}
"""Types of codes → the first compute capability of NVIDIA that multiplies them. AMD's chips of the
third generation multiply integers, and have another type of 8-bit floats."""
NEAREST = tl.constexpr(12582912.0)
"""What is added to this and taken off again becomes the nearest integer."""


@triton.jit
def _round_rows(
    x,
    codes,
    scales,
    columns,
    x_stride,
    given,
    GROUP: tl.constexpr,
    MOST: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each token and GROUP columns. See `pegboard.ops.rounding`."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUP
    last = tl.minimum(first + GROUP, columns)
    row = x + token * x_stride
    if IS_GIVEN:
        scale = given
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(first, last, BLOCK):
            at = start + tl.arange(0, BLOCK)
            values = tl.load(row + at, mask=at < last, other=0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(values))
        scale = tl.div_rn(tl.max(largest, 0), MOST)
        scale = tl.where(scale == 0, 1.0, scale)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(row + at, mask=at < last, other=0).to(tl.float32)
        numbers = tl.div_rn(values, tl.zeros([BLOCK], tl.float32) + scale)
        numbers = tl.minimum(tl.maximum(numbers, -MOST), MOST)
        if IS_FLOAT:
            rounded = numbers.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            rounded = ((numbers + NEAREST) - NEAREST).to(tl.int8)
        tl.store(codes + token * columns + at, rounded, mask=at < last)
    tl.store(scales + token * tl.num_programs(1) + tl.program_id(1), scale)


@triton.jit
def _weights(words, AT: tl.constexpr, IS_FLOAT: tl.constexpr):
    """Return the codes of 8 bits from bit AT of each word on. Integers are stored 128 too high."""
    if IS_FLOAT:
        codes = ((words >> AT) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        codes = (((words >> AT) & 255) - 128).to(tl.int8)
    return codes


@triton.jit(do_not_specialize=["count"])
def _rounded_product(
    x,
    x_scales,
    words,
    scale,
    out,
    count,
    num_rows,
    out_stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program for each TOKENS tokens and ROWS rows of W. BLOCK, GROUP: columns of W and of x
    that share a scale, multiples of 4 · WORDS. IS_WHOLE: all columns do. Tokens and rows beyond the
    last are copies of it."""
    STEP: tl.constexpr = 4 * WORDS
    SUM: tl.constexpr = tl.float32 if IS_FLOAT else tl.int32
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    places = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(places, num_rows - 1)
    known = tl.minimum(tokens, count - 1)
    inner = tl.arange(0, WORDS)[None, :]
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    part = tl.zeros([TOKENS, ROWS], SUM)
    for start in range(0, COLUMNS, STEP):
        packed = tl.load(words + rows[:, None] * (COLUMNS // 4) + start // 4 + inner)
        for place in tl.static_range(4):
            codes = _weights(packed, 8 * place, IS_FLOAT)
            values = tl.load(x + known * COLUMNS + start + place * WORDS + inner)
            if IS_FLOAT:
                values = values.to(tl.float8e4nv, bitcast=True)
                part = tl.dot(values, codes.trans(), part, max_num_imprecise_acc=WORDS)
            else:
                part = tl.dot(values, codes.trans(), part, out_dtype=tl.int32)
        if not IS_WHOLE:
            x_scale = tl.load(x_scales + known * ((COLUMNS + GROUP - 1) // GROUP) + start // GROUP)
            at = rows * ((COLUMNS + BLOCK - 1) // BLOCK) + start // BLOCK
            factor = tl.load(scale + at).to(tl.float32)[None, :]
            total += part.to(tl.float32) * (x_scale * factor)
            part = tl.zeros([TOKENS, ROWS], SUM)
    if IS_WHOLE:
        factor = tl.load(scale + rows).to(tl.float32)[None, :]
        total = part.to(tl.float32) * (tl.load(x_scales + known) * factor)
    tl.store(
        out + tokens * out_stride + places[None, :],
        total.to(out.dtype.element_ty),
        mask=(tokens < count) & (places < num_rows)[None, :],
    )


@cache
def multiplies(type: str) -> bool:
    """Return whether the device multiplies codes of this type."""
    if torch.version.hip:
        return type == "int8"
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= LEAST[type]


def has_codes(packed: Packed, rounding: Rounding) -> bool:
    """Return whether codes of weights can be multiplied with those of activations. Otherwise,
    activations are rounded to what the codes stand for."""
    form = packed.form
    group = rounding.group or packed.columns
    return (
        form.decoding == DECODINGS[rounding.type]
        and form.bits == 8
        and (form.zero, form.shift, form.outer, form.scales) == (0, "", 0, "number")
        and packed.columns % STEP == 0
        and (form.block % STEP == 0 or form.block >= packed.columns)
        and group % STEP == 0
        and rounding.is_simple
        and multiplies(rounding.type)
    )


def round_rows(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Return the codes of x [T, columns], int8 or uint8, and their scales, float32 [T, groups].
    Nothing is read on the host."""
    count, columns = x.shape
    is_float = rounding.type != "int8"
    group = rounding.group or columns
    groups = triton.cdiv(columns, group)
    codes = torch.empty(x.shape, dtype=torch.uint8 if is_float else torch.int8, device=x.device)
    scales = torch.empty((count, groups), dtype=torch.float32, device=x.device)
    if count:
        _round_rows[count, groups](
            x,
            codes,
            scales,
            columns,
            x.stride(0),
            rounding.scale or 1.0,
            GROUP=group,
            MOST=LARGEST[rounding.type],
            IS_FLOAT=is_float,
            IS_GIVEN=rounding.scale is not None,
            BLOCK=min(ROUNDED, triton.next_power_of_2(group)),
        )
    return codes, scales


def constants_of(packed: Packed, rounding: Rounding, count: int) -> dict[str, object]:
    """Return the constants and options of a product. No card has measured the sizes of tiles."""
    num_rows = len(packed.scale)
    columns = packed.columns
    few = count <= 16
    return {
        "COLUMNS": columns,
        "BLOCK": packed.form.block,
        "GROUP": rounding.group or columns,
        "IS_FLOAT": rounding.type != "int8",
        "IS_WHOLE": packed.form.block >= columns and rounding.group in (0, columns),
        "TOKENS": 16 if few else 64,
        "ROWS": (32 if num_rows <= 8192 else 64) if few else 128,
        "WORDS": STEP // 4,
        "num_warps": 4,
        "num_stages": 4 if few else 3,
    }


def multiply_codes(
    codes: Tensor,
    scales: Tensor,
    packed: Packed,
    rounding: Rounding,
    out: Tensor,
    is_invariant: bool = False,
) -> None:
    """Write the products of rounded activations (`round_rows`) with packed rows (`has_codes`) to
    out [T, rows], which may be some columns of a wider tensor. Sums of integers are exact, those of
    floats are float32. is_invariant: a token has the same bits in every step, because all steps
    have the same tiles."""
    count = len(codes)
    num_rows = len(packed.scale)
    constants = constants_of(packed, rounding, MANY_ROWS if is_invariant else count)
    if count:
        grid = triton.cdiv(count, constants["TOKENS"]), triton.cdiv(num_rows, constants["ROWS"])
        (words,) = packed.planes
        _rounded_product[grid](
            codes, scales, words, packed.scale, out, count, num_rows, out.stride(0), **constants
        )
