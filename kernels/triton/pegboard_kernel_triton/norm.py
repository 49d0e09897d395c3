"""Normalization over the last dimension."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048
"""Short rows (heads) are normalized several to a program, up to this many numbers."""


@triton.jit(do_not_specialize=["count"])
def _rms_norm(
    x,
    residual,
    weight,
    out,
    count,
    heads,
    x_token,
    x_head,
    residual_token,
    residual_head,
    size,
    eps,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program for each ROWS rows. A row is one head of a token. The sum of x and residual is
    rounded before it is used, as the reference does."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    mask = (rows < count) & (columns < size)
    token = rows // heads
    head = rows % heads
    values = tl.load(x + token * x_token + head * x_head + columns, mask=mask, other=0).to(
        tl.float32
    )
    if ADDS:
        at = residual + token * residual_token + head * residual_head + columns
        total = (values + tl.load(at, mask=mask, other=0).to(tl.float32)).to(
            residual.dtype.element_ty
        )
        tl.store(at, total, mask=mask)
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1)[:, None] / size + eps)
    factors = tl.load(weight + columns, mask=columns < size, other=0).to(tl.float32)
    tl.store(
        out + rows * size + columns, (values * scale * factors).to(out.dtype.element_ty), mask=mask
    )


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, adds: bool) -> Tensor:
    size = x.shape[-1]
    tokens = x if x.dim() == 3 else x.reshape(-1, 1, size)
    added = residual if residual.dim() == 3 else residual.view(-1, 1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = x.numel() // size
    columns = triton.next_power_of_2(size)
    rows = max(1, ELEMENTS // columns)
    if count:
        _rms_norm[(triton.cdiv(count, rows),)](
            tokens,
            added,
            weight,
            out,
            count,
            tokens.shape[1],
            tokens.stride(0),
            tokens.stride(1),
            added.stride(0),
            added.stride(1),
            size,
            eps,
            ADDS=adds,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=min(16, max(4, columns // 1024)),
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `pegboard.ops.rms_norm`. x: [T, size], or [T, heads, size], which may be a part of a
    wider tensor."""
    return _launch(x, x, weight, eps, adds=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `pegboard.ops.add_rms_norm`."""
    return _launch(x, residual, weight, eps, adds=True), residual
