"""Tokens chosen on the device: the op `sample_tokens`.

A program computes a few rows of logits in several passes over the vocabulary. All cuts are at a
value, which is found by bisection over the order of floats: the k-th largest value is the smallest
t such that fewer than k values are larger than t, and top-p cuts at the smallest t such that the
tokens above t have less than p of the mass. No sort is needed, and nothing is read on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096
"""Logits that a program reads at a time."""
ROWS = 1
"""Rows of one program. More rows make the interpreter faster."""
LOWEST = tl.constexpr(-0x7F800001)
"""Key of −inf."""


@triton.jit
def _keys(x):
    """Return int32 numbers in the order of the floats x. NaN is larger than any number."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _read(logits, rows, is_row, start, vocab, stride, divisor, COLUMNS: tl.constexpr):
    """Return the columns from `start` on [1, COLUMNS], whether each place is in the logits, and the
    logits divided by the temperature."""
    columns = start + tl.arange(0, COLUMNS)[None, :]
    is_inside = is_row & (columns < vocab)
    x = tl.load(logits + rows * stride + columns, mask=is_inside, other=float("-inf"))
    return columns, is_inside, tl.div_rn(x, divisor.broadcast_to(x.shape))


@triton.jit
def _above(
    logits,
    rows,
    is_row,
    vocab,
    stride,
    divisor,
    peak,
    key,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return how many logits have a larger key [ROWS, 1], or the sum of their weights."""
    total = tl.full([ROWS, 1], 0, tl.float64)
    for start in range(0, vocab, COLUMNS):
        _, is_inside, x = _read(logits, rows, is_row, start, vocab, stride, divisor, COLUMNS)
        counted = is_inside & (_keys(x) > key)
        if WEIGHTED:
            part = tl.where(counted, tl.exp(x - peak), 0.0)
        else:
            part = counted.to(tl.float32)
        total += tl.sum(part, axis=1, keep_dims=True).to(tl.float64)
    return total


@triton.jit
def _cut(
    logits,
    rows,
    is_row,
    vocab,
    stride,
    divisor,
    peak,
    low,
    high,
    limit,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the smallest key in low … high (int64) for which `_above` is less than `limit`. It is
    less for `high`."""
    while tl.max(high - low) > 0:
        middle = low + (high - low) // 2
        is_less = (
            _above(
                logits, rows, is_row, vocab, stride, divisor, peak, middle, WEIGHTED, ROWS, COLUMNS
            )
            < limit
        )
        searched = low < high
        high = tl.where(searched & is_less, middle, high)
        low = tl.where(searched & (is_less == 0), middle + 1, low)
    return high


@triton.jit(do_not_specialize=["count"])
def _sample(
    logits,
    uniforms,
    temperature,
    min_p,
    top_k,
    top_p,
    out,
    count,
    vocab,
    stride,
    DRAWS: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program for each ROWS rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    is_row = rows < count
    divisor = tl.full([ROWS, 1], 1.0, tl.float32)
    highest = tl.full([ROWS, 1], -0x80000000, tl.int32)
    best = tl.full([ROWS, 1], 0, tl.int32)
    for start in range(0, vocab, COLUMNS):
        columns, is_inside, x = _read(logits, rows, is_row, start, vocab, stride, divisor, COLUMNS)
        keys = tl.where(is_inside, _keys(x), -0x80000000)
        largest = tl.max(keys, axis=1, keep_dims=True)
        first = tl.min(tl.where(keys == largest, columns, vocab), axis=1, keep_dims=True)
        best = tl.where(largest > highest, first, best)
        highest = tl.maximum(highest, largest)
    chosen = best.to(tl.int64)
    if DRAWS:
        heat = tl.load(temperature + rows, mask=is_row, other=0)
        divisor = tl.where(heat > 0, heat, 1.0)
        peak = tl.div_rn(tl.load(logits + rows * stride + best, mask=is_row, other=0), divisor)
        high = _keys(peak).to(tl.int64)
        low = tl.full([ROWS, 1], LOWEST, tl.int64)
        off = (is_row & (heat > 0)) == 0
        if HAS_MIN_P:
            share = tl.load(min_p + rows, mask=is_row, other=0)
            floor = _keys(peak + tl.log(tl.where(share > 0, share, 1.0))).to(tl.int64)
            low = tl.where((share > 0) & (peak == peak), tl.maximum(low, floor), low)
        if HAS_TOP_K:
            k = tl.load(top_k + rows, mask=is_row, other=0)
            cut = _cut(
                logits,
                rows,
                is_row,
                vocab,
                stride,
                divisor,
                peak,
                tl.where(off | (k >= vocab), high, low),
                high,
                k.to(tl.float64),
                False,
                ROWS,
                COLUMNS,
            )
            low = tl.where(off | (k >= vocab), low, cut)
        if HAS_TOP_P:
            p = tl.load(top_p + rows, mask=is_row, other=1)
            mass = _above(
                logits, rows, is_row, vocab, stride, divisor, peak, low - 1, True, ROWS, COLUMNS
            )
            cut = _cut(
                logits,
                rows,
                is_row,
                vocab,
                stride,
                divisor,
                peak,
                tl.where(off | (p >= 1), high, low),
                high,
                p.to(tl.float64) * mass,
                True,
                ROWS,
                COLUMNS,
            )
            low = tl.where(off | (p >= 1), low, cut)

        total = tl.full([ROWS, 1], 0, tl.float64)
        last = tl.full([ROWS, 1], 0, tl.int32)
        for start in range(0, vocab, COLUMNS):
            columns, is_inside, x = _read(
                logits, rows, is_row, start, vocab, stride, divisor, COLUMNS
            )
            weights = tl.where(is_inside & (_keys(x) >= low), tl.exp(x - peak), 0.0)
            total += tl.sum(weights.to(tl.float64), axis=1, keep_dims=True)
            last = tl.maximum(
                last, tl.max(tl.where(weights > 0, columns, 0), axis=1, keep_dims=True)
            )
        # u · total may be rounded up to the total, which no cumulative weight exceeds
        before = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
        wanted = tl.minimum(tl.load(uniforms + rows, mask=is_row, other=0) * total, before)
        drawn = last
        passed = tl.full([ROWS, 1], 0, tl.float64)
        for start in range(0, vocab, COLUMNS):
            columns, is_inside, x = _read(
                logits, rows, is_row, start, vocab, stride, divisor, COLUMNS
            )
            weights = tl.where(is_inside & (_keys(x) >= low), tl.exp(x - peak), 0.0).to(tl.float64)
            reached = (passed + tl.cumsum(weights, axis=1) > wanted) & (weights > 0)
            drawn = tl.minimum(
                drawn, tl.min(tl.where(reached, columns, vocab), axis=1, keep_dims=True)
            )
            passed += tl.sum(weights, axis=1, keep_dims=True)
        is_drawn = (heat > 0) & (total > 0) & (total < float("inf"))  # false if the total is NaN
        chosen = tl.where(is_drawn, drawn.to(tl.int64), chosen)
    tl.store(out + rows, chosen, mask=is_row)


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor | None = None,
    temperature: Tensor | None = None,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """See `pegboard.ops.sampling.sample_tokens`. Nothing waits for the device. Weights are float32,
    and their sums float64. The last dimension of the logits is contiguous."""
    count, vocab = logits.shape
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    draws = temperature is not None and uniforms is not None
    if count:
        rows = min(ROWS, triton.next_power_of_2(count))
        _sample[(triton.cdiv(count, rows),)](
            logits,
            uniforms,
            temperature,
            min_p,
            top_k,
            top_p,
            out,
            count,
            vocab,
            logits.stride(0),
            DRAWS=draws,
            HAS_MIN_P=min_p is not None,
            HAS_TOP_K=top_k is not None,
            HAS_TOP_P=top_p is not None,
            ROWS=rows,
            COLUMNS=min(COLUMNS, triton.next_power_of_2(vocab)),
            num_warps=8,
        )
    return out
