"""Rounds floats to `Blocks`, each to the nearest code. 32 columns share a scale and, for 4-bit codes, a minimum.

Scales and minimums are float16, rounded so that the codes can reach every value of the block. The codes are then chosen for the
rounded scales and minimums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pegboard.ops.blocks import Blocks

BLOCK_SIZE = 32
CHUNK_ELEMENTS = 1 << 20
"""Number of elements that are rounded at a time. The temporary memory is a few times this number of floats."""


def round_to_blocks(values: Tensor, bits: int) -> Blocks | None:
    """Return the blocks of `values` [rows, columns], which may have any float type. columns must be a multiple of the block size.
    Returns None if a block has no finite float16 scale."""
    rows, columns = values.shape
    per_row = columns // BLOCK_SIZE
    codes = torch.empty(rows, columns, dtype=torch.uint8 if bits == 4 else torch.int8)
    scale = torch.empty(rows, per_row, dtype=torch.float16)
    minimum = torch.empty(rows, per_row, dtype=torch.float16) if bits == 4 else None
    step = max(1, CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        cut = slice(start, start + step)
        blocks = values[cut].to("cpu", torch.float32).reshape(-1, BLOCK_SIZE)
        if minimum is None:
            found = _round_int8(blocks)
        else:
            *found, low = _round_int4(blocks)
            minimum[cut] = low.view(-1, per_row)
        codes[cut], scale[cut] = found[0].view(-1, columns), found[1].view(-1, per_row)
    if not scale.isfinite().all() or (minimum is not None and not minimum.isfinite().all()):
        return None
    return Blocks(bits, BLOCK_SIZE, codes, scale, minimum)


def _round_int8(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Round with a scale alone, to codes from -127 to 127: [n, 32] → codes, scale [n]."""
    scale = _half_above(blocks.abs().amax(1) / 127)
    return _codes(blocks, scale, -127, 127).to(torch.int8), scale


def _round_int4(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round in 15 steps from the smallest value to the largest: [n, 32] → codes, scale [n], minimum [n]."""
    low, high = blocks.aminmax(dim=1)
    minimum = -_half_above(-low)
    start = minimum.float()
    scale = _half_above((high - start) / 15)
    return _codes(blocks - start.unsqueeze(1), scale, 0, 15).to(torch.uint8), scale, minimum


def _codes(blocks: Tensor, scale: Tensor, first: int, last: int) -> Tensor:
    inverse = torch.where(scale > 0, 1 / scale.float(), 0).unsqueeze(1)
    return (blocks * inverse).round_().clamp_(first, last)


def _half_above(values: Tensor) -> Tensor:
    """Return the smallest float16 that is not below each value: [n] float32 → [n] float16."""
    half = values.half()
    bits = half.view(torch.int16)
    above = torch.where(half == 0, torch.ones_like(bits), torch.where(bits < 0, bits - 1, bits + 1))
    return torch.where(half.float() < values, above, bits).view(torch.float16)
