"""Products of the matrices of experts. Every expert multiplies the rows that were sorted to it.

The rows are divided into tiles, each of one expert. Only the device knows how many rows an expert
has, so there are as many programs as there could be tiles, and each finds its tile there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUPS = tl.constexpr(128)
"""Experts whose starts a program reads at a time."""
FEW_ROWS = 16
MANY_ROWS = 64


@triton.jit
def tile_of(starts, pid, E, BLOCK_M: tl.constexpr):
    """Return the tile of program `pid` among sorted rows: its expert, its first row, and the row
    after the last one of this expert.

    starts: int32 [E + 1]; expert e has the rows starts[e] to starts[e + 1]. Its tiles start at
    multiples of BLOCK_M rows after starts[e]. Tiles after those of all experts have the expert E.
    They are the rows from starts[E] on, and never end: the caller knows how many rows there are.
    """
    expert = 0
    before = 0  # tiles of the experts before this one
    total = 0
    for chunk in range(0, E, GROUPS):
        numbers = chunk + tl.arange(0, GROUPS)
        is_expert = numbers < E
        first = tl.load(starts + numbers, mask=is_expert, other=0)
        stop = tl.load(starts + numbers + 1, mask=is_expert, other=0)
        tiles = (stop - first + BLOCK_M - 1) // BLOCK_M
        is_before = is_expert & (total + tl.cumsum(tiles, 0) <= pid)
        expert += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, tiles, 0), 0)
        total += tl.sum(tiles, 0)
    first = tl.load(starts + expert) + (pid - before) * BLOCK_M
    stop = tl.load(starts + expert + 1, mask=expert < E, other=2147483647)
    return expert, first, stop


def precision_of(dtype: torch.dtype) -> str:
    """Return how a kernel multiplies numbers of this type: float32 is not rounded."""
    return "ieee" if dtype == torch.float32 else "tf32"


def num_tiles(num_rows: int, num_groups: int, block: int) -> int:
    """Return how many tiles of `block` rows there are at most, of so many rows in so many
    groups."""
    return (num_rows + min(num_rows, num_groups) * (block - 1)) // block


def rows_of_tile(num_rows: int, num_groups: int) -> int:
    """Return BLOCK_M for so many rows in so many groups."""
    return FEW_ROWS if num_rows <= 2 * FEW_ROWS * num_groups else MANY_ROWS


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def _multiply_experts(
    x,
    weights,
    bias,
    starts,
    out,
    num_rows,
    num_experts,
    in_features,
    out_features,
    x_row,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for each tile and BLOCK_N outputs. Rows without an expert become zeros."""
    expert, first, stop = tile_of(starts, tl.program_id(0), num_experts, BLOCK_M)
    if first >= num_rows:
        return
    rows = first + tl.arange(0, BLOCK_M)
    is_row = (rows < stop) & (rows < num_rows)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < out_features
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if expert < num_experts:
        matrix = weights + expert.to(tl.int64) * out_features * in_features
        x_at = x + rows.to(tl.int64)[:, None] * x_row
        weight_at = matrix + outputs.to(tl.int64)[None, :] * in_features
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
        if HAS_BIAS:
            added = tl.load(bias + expert * out_features + outputs, mask=is_output, other=0)
            total += added.to(tl.float32)[None, :]
    tl.store(
        out + rows.to(tl.int64)[:, None] * out_features + outputs[None, :],
        total.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


def multiply_experts(
    x: Tensor,
    starts: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    is_invariant: bool = False,
) -> Tensor:
    """Multiply sorted rows with the matrices of their experts: x [N, in], weights [E, out, in] and
    starts int32 [E + 1] (see `pegboard.ops.sort_by_expert`) → [N, out], of x's type.

    bias: [E, out]. Rows after starts[E] become zeros. x is rounded to the type of the weights, and
    products are added up in float32. is_invariant: a row has the same bits in every step, because
    all steps have the same tiles. Nothing is read on the host.
    """
    num_rows, in_features = x.shape
    num_experts, out_features, _ = weights.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    block = MANY_ROWS if is_invariant else rows_of_tile(num_rows, num_experts)
    is_few = block == FEW_ROWS
    outputs = 64 if is_few else 128
    if num_rows:
        _multiply_experts[
            (num_tiles(num_rows, num_experts + 1, block), triton.cdiv(out_features, outputs))
        ](
            x,
            weights,
            weights if bias is None else bias,
            starts,
            out,
            num_rows,
            num_experts,
            in_features,
            out_features,
            x.stride(0),
            HAS_BIAS=bias is not None,
            PRECISION=precision_of(weights.dtype),
            BLOCK_M=block,
            BLOCK_N=outputs,
            BLOCK_K=(256 if is_few else 128) // weights.itemsize,
            num_stages=3 if is_few else 2,
        )
    return out
