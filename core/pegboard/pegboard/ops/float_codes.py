"""Weights that are stored as small floats (8, 6 or 4 bits) or as positions in a table of floats,
with a scale per block.

Like `Blocks`, this says what a matrix means, not how a file or a kernel arranges it. Activations
are not quantized here. A format may allow a kernel to do that, but computing without it is exact
enough, and more exact than with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pegboard.ops.blocks import BlockWeight


@dataclass(frozen=True, slots=True)
class ScaleCodes:
    """Scales that are codes themselves: values[codes[r, b]] · outer[r, b // N] + offset, computed
    in float32.

    codes: uint8 [rows / R, blocks], each less than the number of values. values: float32 [2 to
    256]. outer: float16 or float32 [rows / R, blocks / N], the second level.
    """

    codes: Tensor
    values: Tensor
    outer: Tensor
    offset: float = 0.0

    def float(self) -> Tensor:
        """Return the scales as float32 [rows / R, blocks]."""
        outer = self.outer.float().repeat_interleave(self.codes.shape[1] // self.outer.shape[1], 1)
        return self.values[self.codes.int()] * outer + self.offset


@dataclass(frozen=True, slots=True)
class FloatCodes:
    """Some rows of a matrix: W[r, c] = values[codes[r, c]] · (scale[r // R, c // C] · factor) with
    R, C = block.

    codes: uint8 [rows, columns], each less than the number of values. values: float32 [16], [64] or
    [256], what the codes stand for. scale: [rows / R, columns / C], both rounded up, as stored:
    float32, float16, bfloat16, float8_e4m3fn, float8_e8m0fnu or codes.
    factor: a scale of the whole matrix. Its product with a scale is computed in double precision
    and rounded once, so a format that divides by d has the factor 1 / d.
    """

    codes: Tensor
    values: Tensor
    scale: Tensor | ScaleCodes
    block: tuple[int, int]
    factor: float = 1.0

    def scales(self) -> Tensor:
        """Return scale · factor for every row, as float32 [rows, columns / C]."""
        scale = (self.scale.float().to(torch.float64) * self.factor).float()
        return scale.repeat_interleave(self.block[0], 0)[: self.codes.shape[0]]

    def dense(self) -> Tensor:
        """Return the rows as float32 [rows, columns]."""
        scales = self.scales().repeat_interleave(self.block[1], 1)[:, : self.codes.shape[1]]
        return self.values[self.codes.int()].mul_(scales)


def float8_values(dtype: torch.dtype) -> Tensor:
    """Return what the 256 codes of an 8-bit float type of torch stand for. NaN and infinities are
    included."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def minifloat_values(exponent_bits: int, mantissa_bits: int) -> Tensor:
    """Return what the codes of a float stand for that has a sign, these bits, no infinities and no
    NaN (FP4, FP6)."""
    code = torch.arange(2 ** (exponent_bits + mantissa_bits))
    exponent = code >> mantissa_bits
    mantissa = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    one = 2.0 ** (1 - (2 ** (exponent_bits - 1) - 1))  # the smallest normal number
    positive = torch.where(
        exponent == 0, mantissa * one, (1 + mantissa) * one * 2.0 ** (exponent - 1)
    )
    return torch.cat((positive, -positive))


E2M1 = minifloat_values(2, 1)
"""FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same with a minus sign."""


class CodeWeight(BlockWeight):
    """A matrix [out, in] made of `FloatCodes`, which may have different formats. Rows that were not
    written are zero.

    See `BlockWeight`, which this reference differs from in what `write` takes. A kernel plugin's
    class (weight format `code_weight`) has the same methods.
    """
