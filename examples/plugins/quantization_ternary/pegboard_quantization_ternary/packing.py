"""Four ternary weights in a byte."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 2
PER_BYTE = 4
ZERO = 1
"""The code of a weight of 0."""
SHIFTS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)


def quantize(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return `weight_packed` and `weight_scale` of a matrix [out, in]; `in` is a multiple of 4. The
    scale of a row is the mean size of its weights (Ma et al. 2024)."""
    scale = matrix.float().abs().mean(1).clamp_min(1e-8)
    codes = (matrix.float() / scale[:, None]).round().clamp(-1, 1) + ZERO
    return pack(codes.to(torch.uint8)), scale


def pack(codes: Tensor) -> Tensor:
    """Return uint8 codes [out, in] from 0 to 2 as bytes [out, in / 4]."""
    fours = codes.unflatten(1, (-1, PER_BYTE))
    return (fours << SHIFTS).sum(2, dtype=torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Return the codes of `pack`. A byte may hold a code of 3, which means nothing."""
    return (packed[:, :, None] >> SHIFTS & 3).flatten(1)
