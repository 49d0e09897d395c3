"""Products of a float matrix that are batch invariant. All steps have the same tiles, and one
program adds up all columns of a tile, in their order. What torch's products do is chosen by the
number of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pegboard_kernel_triton.experts import MANY_ROWS, precision_of

NARROW = 8192
"""Matrices of at most so many rows are divided into narrow tiles, which make more programs."""


@triton.jit(do_not_specialize=["count"])
def _multiply_floats(
    x,
    weight,
    out,
    count,
    in_features,
    out_features,
    x_row,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for BLOCK_M rows of x and BLOCK_N outputs. Those that read the same part of the
    matrix follow each other."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < count
    is_output = outputs < out_features
    x_at = x + rows[:, None] * x_row
    weight_at = weight + outputs[None, :] * in_features
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_features, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        is_column = columns < in_features
        inputs = tl.load(
            x_at + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0
        )
        part = tl.load(
            weight_at + columns[:, None], mask=is_column[:, None] & is_output[None, :], other=0
        )
        total = tl.dot(inputs.to(part.dtype), part, total, input_precision=PRECISION)
    tl.store(
        out + rows[:, None] * out_features + outputs[None, :],
        total.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


def constants_of(out_features: int, dtype: torch.dtype) -> dict[str, object]:
    """Return the constants and options of a launch, which depend on the matrix only. dtype: of the
    matrix. No card has measured the sizes of tiles."""
    return {
        "PRECISION": precision_of(dtype),
        "BLOCK_M": MANY_ROWS,
        "BLOCK_N": 32 if out_features <= NARROW else 64,
        "BLOCK_K": 256 // dtype.itemsize,
        "num_warps": 4,
        "num_stages": 3,
    }


def multiply_floats(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows x [T, in] with a contiguous matrix [out, in] → [T, out], of x's type. x is
    rounded to the type of the matrix, and products are added up in float32. A row has the same bits
    in every step."""
    count, in_features = x.shape
    out_features = len(weight)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(count, out_features, dtype=x.dtype, device=x.device)
    constants = constants_of(out_features, weight.dtype)
    if count:
        grid = triton.cdiv(count, MANY_ROWS), triton.cdiv(out_features, constants["BLOCK_N"])
        _multiply_floats[grid](
            x, weight, out, count, in_features, out_features, x.stride(0), **constants
        )
    return out
