"""Rounds floats to `Blocks`, each to the nearest code. 32 columns or more share a scale and, for up
to 4 bits, a minimum.

Scales and minimums are float16, rounded so that the codes can reach every value of the block. The
codes are then chosen for the rounded scales and minimums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pegboard.ops.blocks import Blocks

BLOCK_SIZE = 32
CHUNK_ELEMENTS = 1 << 20
"""Number of elements that are rounded at a time. The temporary memory is a few times this number of
floats."""


def round_to_blocks(values: Tensor, bits: int, block_size: int = BLOCK_SIZE) -> Blocks | None:
    """Return the blocks of `values` [rows, columns], which may have any float type. bits: from 2 to
    8. columns must be a multiple of the block size. Returns None if a block has no finite float16
      scale."""
    rows, columns = values.shape
    per_row = columns // block_size
    has_minimum = bits <= 4
    codes = torch.empty(rows, columns, dtype=torch.int8 if bits == 8 else torch.uint8)
    scale = torch.empty(rows, per_row, dtype=torch.float16)
    minimum = torch.empty(rows, per_row, dtype=torch.float16) if has_minimum else None
    zero = 0 if bits == 8 or has_minimum else 2 ** (bits - 1)
    step = max(1, CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        cut = slice(start, start + step)
        blocks = values[cut].to("cpu", torch.float32).reshape(-1, block_size)
        if minimum is None:
            block_codes, scales = _round_signed(blocks, 2 ** (bits - 1) - 1)
        else:
            block_codes, scales, low = _round_above_minimum(blocks, 2**bits - 1)
            minimum[cut] = low.view(-1, per_row)
        codes[cut] = (block_codes + zero if zero else block_codes).view(-1, columns)
        scale[cut] = scales.view(-1, per_row)
    if not scale.isfinite().all() or (minimum is not None and not minimum.isfinite().all()):
        return None
    return Blocks(bits, block_size, codes, scale, minimum, zero)


def _round_signed(blocks: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Round with a scale alone, to codes from -last to last: [n, block size] → codes, scale [n]."""
    scale = _half_above(blocks.abs().amax(1) / last)
    return _codes(blocks, scale, -last, last).to(torch.int8), scale


def _round_above_minimum(blocks: Tensor, last: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round in `last` steps from the smallest value to the largest: [n, block size] → codes, scale
    [n], minimum [n]."""
    low, high = blocks.aminmax(dim=1)
    minimum = -_half_above(-low)
    start = minimum.float()
    scale = _half_above((high - start) / last)
    return _codes(blocks - start.unsqueeze(1), scale, 0, last).to(torch.uint8), scale, minimum


def _codes(blocks: Tensor, scale: Tensor, first: int, last: int) -> Tensor:
    inverse = torch.where(scale > 0, 1 / scale.float(), 0).unsqueeze(1)
    return (blocks * inverse).round_().clamp_(first, last)


def _half_above(values: Tensor) -> Tensor:
    """Return the smallest float16 that is not below each value: [n] float32 → [n] float16."""
    half = values.half()
    bits = half.view(torch.int16)
    above = torch.where(half == 0, torch.ones_like(bits), torch.where(bits < 0, bits - 1, bits + 1))
    return torch.where(half.float() < values, above, bits).view(torch.float16)
