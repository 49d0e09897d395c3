"""Low-rank adapters: the products with A, and then with B, of rows that are sorted by adapter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pegboard import ops
from pegboard.ops import AdapterExchange, AdapterRows
from pegboard_kernel_triton.experts import num_tiles, precision_of, rows_of_tile, tile_of

LANES = 16
"""The smallest side of a matrix that `tl.dot` multiplies."""
PARTS = 4
"""Parts of a layer that one launch writes."""
COLUMNS_OF_SPLIT = 512
MAX_SPLITS = 8


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _shrink(
    x,
    a,
    ranks,
    order,
    starts,
    shrunk,
    num_rows,
    num_slots,
    in_features,
    columns,
    width,
    x_row,
    IS_LOOKUP: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for each tile of rows, BLOCK_R ranks of a part, and SPLIT columns of x. Ranks
    that the adapter does not have stay unwritten."""
    slot, first, stop = tile_of(starts + 1, tl.program_id(0), num_slots, BLOCK_M)
    if slot >= num_slots:
        return
    blocks = (width + BLOCK_R - 1) // BLOCK_R
    lane = tl.program_id(1) % blocks * BLOCK_R
    if lane >= tl.load(ranks + slot):
        return
    lanes = lane + tl.arange(0, BLOCK_R)
    is_lane = lanes < width
    at = tl.program_id(1) // blocks * width + lanes
    places = first + tl.arange(0, BLOCK_M)
    is_row = places < stop
    rows = tl.load(order + places, mask=is_row, other=0).to(tl.int64)
    matrix = a + slot.to(tl.int64) * in_features * columns
    if IS_LOOKUP:
        number = tl.load(x + rows, mask=is_row, other=0).to(tl.int64)
        total = tl.load(
            matrix + number[:, None] * columns + at[None, :],
            mask=is_row[:, None] & is_lane[None, :],
            other=0,
        ).to(tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        begin = tl.program_id(2) * SPLIT
        end = tl.minimum(begin + SPLIT, in_features)
        for start in range(begin, end, BLOCK_K):
            channels = start + tl.arange(0, BLOCK_K)
            is_channel = channels < end
            inputs = tl.load(
                x + rows[:, None] * x_row + channels[None, :],
                mask=is_row[:, None] & is_channel[None, :],
                other=0,
            )
            part = tl.load(
                matrix + channels.to(tl.int64)[:, None] * columns + at[None, :],
                mask=is_channel[:, None] & is_lane[None, :],
                other=0,
            )
            total = tl.dot(inputs, part.to(inputs.dtype), total, input_precision=PRECISION)
    target = (tl.program_id(2) * num_rows + places).to(tl.int64)[:, None] * columns + at[None, :]
    tl.store(shrunk + target, total, mask=is_row[:, None] & is_lane[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _expand(
    y,
    shrunk,
    b,
    ranks,
    order,
    starts,
    num_rows,
    num_slots,
    max_rank,
    out_features,
    columns,
    member_columns,
    column0,
    column1,
    column2,
    column3,
    bound0,
    bound1,
    bound2,
    bound3,
    bound4,
    y_row,
    SPLITS: tl.constexpr,
    TURNS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program for each tile of rows and BLOCK_N outputs of one of four parts. column0 …: of
    each part's products with A. TURNS members have their ranks in turn, each member_columns."""
    slot, first, stop = tile_of(starts + 1, tl.program_id(0), num_slots, BLOCK_M)
    if slot >= num_slots:
        return
    rank = tl.load(ranks + slot)
    if rank == 0:
        return
    block = tl.program_id(1)
    begin = bound0
    end = bound1
    column = column0
    blocks = (bound1 - bound0 + BLOCK_N - 1) // BLOCK_N
    if block >= blocks:
        block -= blocks
        begin = bound1
        end = bound2
        column = column1
        blocks = (bound2 - bound1 + BLOCK_N - 1) // BLOCK_N
        if block >= blocks:
            block -= blocks
            begin = bound2
            end = bound3
            column = column2
            blocks = (bound3 - bound2 + BLOCK_N - 1) // BLOCK_N
            if block >= blocks:
                block -= blocks
                begin = bound3
                end = bound4
                column = column3
    outputs = begin + block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < end
    places = first + tl.arange(0, BLOCK_M)
    is_row = places < stop
    matrix = b + slot.to(tl.int64) * max_rank * out_features
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, rank, BLOCK_R, num_stages=1):  # more would hold many splits at once
        lanes = start + tl.arange(0, BLOCK_R)
        is_lane = lanes < rank
        mask = is_row[:, None] & is_lane[None, :]
        held = column + lanes % TURNS * member_columns + lanes // TURNS
        inputs = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for split in tl.static_range(SPLITS):
            source = (split * num_rows + places).to(tl.int64)[:, None] * columns
            inputs += tl.load(shrunk + source + held[None, :], mask=mask, other=0).to(tl.float32)
        part = tl.load(
            matrix + lanes.to(tl.int64)[:, None] * out_features + outputs[None, :],
            mask=is_lane[:, None] & is_output[None, :],
            other=0,
        ).to(y.dtype.element_ty)
        total = tl.dot(inputs.to(part.dtype), part, total, input_precision=PRECISION)
    rows = tl.load(order + places, mask=is_row, other=0).to(tl.int64)
    target = y + rows[:, None] * y_row + outputs[None, :]
    mask = is_row[:, None] & is_output[None, :]
    total += tl.load(target, mask=mask, other=0).to(tl.float32)
    tl.store(target, total.to(y.dtype.element_ty), mask=mask)


def lora_add(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    bounds: Sequence[int],
    rows: AdapterRows,
    exchange: AdapterExchange | None = None,
) -> Tensor:
    """See `pegboard.ops.lora_add`. Nothing is read on the host, and what is launched depends on
    shapes only, so a capture serves any adapters.

    Products with A are added up in float32 and rounded to y's type. What ranks exchange is sorted
    by adapter, as on all of them, and zero where there is no product.
    """
    if y.stride(1) != 1:
        return ops.lora_add(y, x, a, b, ranks, bounds, rows, exchange)
    num_rows = len(y)
    num_slots, in_features, columns = a.shape
    num_parts = len(bounds) - 1
    firsts: Sequence[int] = range(0, columns, columns // num_parts)
    held = (ranks, num_parts, columns // num_parts)
    if exchange is not None:
        firsts = exchange.firsts
        held = (exchange.columns, 1, columns)
    if not num_rows:
        return y
    is_lookup = x.dim() == 1
    x = x if x.stride(-1) == 1 else x.contiguous()
    splits = 1 if is_lookup else min(MAX_SPLITS, triton.cdiv(in_features, COLUMNS_OF_SPLIT))
    block_k = LANES if is_lookup else 256 // x.itemsize
    split = triton.cdiv(triton.cdiv(in_features, splits), block_k) * block_k
    block = rows_of_tile(num_rows, num_slots)
    own_ranks, own_parts, width = held
    lanes = min(4 * LANES, max(LANES, triton.next_power_of_2(width)))
    new = torch.empty if exchange is None else torch.zeros
    shrunk = new(splits, num_rows, columns, dtype=torch.float32, device=y.device)
    tiles = num_tiles(num_rows, num_slots, block)
    _shrink[(tiles, own_parts * triton.cdiv(width, lanes), splits)](
        x,
        a,
        own_ranks,
        rows.order,
        rows.starts,
        shrunk,
        num_rows,
        num_slots,
        in_features,
        columns,
        width,
        x.stride(0),
        IS_LOOKUP=is_lookup,
        SPLIT=split,
        PRECISION=precision_of(x.dtype),
        BLOCK_M=block,
        BLOCK_R=lanes,
        BLOCK_K=block_k,
        num_stages=2,
    )
    turns = 1
    if exchange is not None:
        turns = exchange.turns
        shrunk = exchange.run(shrunk.sum(0).to(y.dtype))
        splits = 1
    outputs = 128
    for part in range(0, num_parts, PARTS):
        ends = [bounds[min(part + index, num_parts)] for index in range(PARTS + 1)]
        starts = [firsts[min(part + index, num_parts - 1)] for index in range(PARTS)]
        blocks = sum(
            triton.cdiv(end - start, outputs) for start, end in zip(ends, ends[1:], strict=False)
        )
        if blocks:
            _expand[(tiles, blocks)](
                y,
                shrunk,
                b,
                ranks,
                rows.order,
                rows.starts,
                num_rows,
                num_slots,
                b.shape[1],
                b.shape[2],
                shrunk.shape[-1],
                columns,
                *starts,
                *ends,
                y.stride(0),
                SPLITS=splits,
                TURNS=turns,
                PRECISION=precision_of(y.dtype),
                BLOCK_M=block,
                BLOCK_N=outputs,
                BLOCK_R=lanes,
                num_stages=2,
            )
    return y
