"""Rotary position embedding and gated activations."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048
"""Numbers that one program computes."""


@triton.jit
def _rope(
    x,
    cos,
    sin,
    out,
    heads,
    x_token,
    x_head,
    cos_token,
    sin_token,
    D: tl.constexpr,
    R: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    TURNED: tl.constexpr,
    COPIED: tl.constexpr,
):
    """One program for each token and HEADS heads. COPIED is 0 if all channels are rotated."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    source = x + token * x_token + head * x_head
    target = out + (token * heads + head) * D
    at = tl.arange(0, TURNED)[None, :]
    mask = (head < heads) & (at < R)
    c = tl.load(cos + token * cos_token + at, mask=at < R, other=0)
    s = tl.load(sin + token * sin_token + at, mask=at < R, other=0)
    if PAIRS:
        first_at = 2 * at
        second_at = 2 * at + 1
    else:
        first_at = at
        second_at = at + R
    first = tl.load(source + first_at, mask=mask, other=0).to(tl.float32)
    second = tl.load(source + second_at, mask=mask, other=0).to(tl.float32)
    tl.store(target + first_at, (first * c - second * s).to(out.dtype.element_ty), mask=mask)
    tl.store(target + second_at, (second * c + first * s).to(out.dtype.element_ty), mask=mask)
    if COPIED:
        rest = 2 * R + tl.arange(0, COPIED)[None, :]
        mask = (head < heads) & (rest < D)
        tl.store(target + rest, tl.load(source + rest, mask=mask), mask=mask)


def rope(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """See `pegboard.ops.rope`. The rotation is computed in float32. The last dimension of x, cos
    and sin is contiguous."""
    num_tokens, heads, width = x.shape
    turned = cos.shape[-1]
    copied = width - 2 * cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(turned)
    together = min(triton.next_power_of_2(heads), max(1, ELEMENTS // (2 * columns)))
    if num_tokens:
        _rope[(num_tokens, triton.cdiv(heads, together))](
            x,
            cos,
            sin,
            out,
            heads,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
            sin.stride(0),
            D=width,
            R=turned,
            PAIRS=pairs,
            HEADS=together,
            TURNED=columns,
            COPIED=triton.next_power_of_2(copied) if copied else 0,
        )
    return out


@triton.jit
def _gated(x, out, x_token, size, SLOPE: tl.constexpr, CUBE: tl.constexpr, COLUMNS: tl.constexpr):
    """gate * sigmoid(SLOPE * (gate + CUBE * gate³)) * up, one program for each token and COLUMNS
    columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < size
    gate = tl.load(x + token * x_token + columns, mask=mask, other=0).to(tl.float32)
    up = tl.load(x + token * x_token + size + columns, mask=mask, other=0).to(tl.float32)
    active = gate * tl.sigmoid(SLOPE * (gate + CUBE * gate * gate * gate))
    tl.store(out + token * size + columns, (active * up).to(out.dtype.element_ty), mask=mask)


def _launch_gated(x: Tensor, slope: float, cube: float) -> Tensor:
    size = x.shape[-1] // 2
    rows = x.reshape(-1, 2 * size)
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    columns = min(ELEMENTS, triton.next_power_of_2(size))
    if len(rows):
        _gated[(len(rows), triton.cdiv(size, columns))](
            rows, out, rows.stride(0), size, SLOPE=slope, CUBE=cube, COLUMNS=columns
        )
    return out


def silu_mul(x: Tensor) -> Tensor:
    """See `pegboard.ops.silu_mul`."""
    return _launch_gated(x, 1.0, 0.0)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """See `pegboard.ops.gelu_tanh_mul`. (1 + tanh(y)) / 2 is computed as sigmoid(2 y)."""
    return _launch_gated(x, 2 * math.sqrt(2 / math.pi), 0.044715)
