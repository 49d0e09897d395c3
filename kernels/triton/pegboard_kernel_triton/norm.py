"""Normalization over the last dimension."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048
"""Short rows (heads) are normalized several to a program, up to this many numbers."""


@triton.jit(do_not_specialize=["count"])
def _norm(
    x,
    residual,
    weight,
    bias,
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
    CENTRES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program for each ROWS rows. A row is one head of a token. The sum of x and residual is
    rounded before it is used, as the reference does. CENTRES: the mean is subtracted first."""
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
    if CENTRES:
        values = tl.where(mask, values - tl.sum(values, axis=1)[:, None] / size, 0)
    scale = tl.rsqrt(tl.sum(values * values, axis=1)[:, None] / size + eps)
    factors = tl.load(weight + columns, mask=columns < size, other=0).to(tl.float32)
    values = values * scale * factors
    if HAS_BIAS:
        values += tl.load(bias + columns, mask=columns < size, other=0).to(tl.float32)
    tl.store(out + rows * size + columns, values.to(out.dtype.element_ty), mask=mask)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centres: bool,
) -> Tensor:
    size = x.shape[-1]
    tokens = x if x.dim() == 3 else x.reshape(-1, 1, size)
    added = tokens
    if residual is not None:
        added = residual if residual.dim() == 3 else residual.view(-1, 1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = x.numel() // size
    columns = triton.next_power_of_2(size)
    rows = max(1, ELEMENTS // columns)
    if count:
        _norm[(triton.cdiv(count, rows),)](
            tokens,
            added,
            weight,
            bias,
            out,
            count,
            tokens.shape[1],
            tokens.stride(0),
            tokens.stride(1),
            added.stride(0),
            added.stride(1),
            size,
            eps,
            ADDS=residual is not None,
            CENTRES=centres,
            HAS_BIAS=bias is not None,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=min(16, max(4, columns // 1024)),
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `pegboard.ops.rms_norm`. x: [T, size], or [T, heads, size], which may be a part of a
    wider tensor."""
    return _launch(x, None, weight, None, eps, centres=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `pegboard.ops.add_rms_norm`."""
    return _launch(x, residual, weight, None, eps, centres=False), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `pegboard.ops.layer_norm`. x: as in `rms_norm`."""
    return _launch(x, None, weight, bias, eps, centres=True)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See `pegboard.ops.add_layer_norm`."""
    return _launch(x, residual, weight, bias, eps, centres=True), residual
