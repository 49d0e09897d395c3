"""Activations that are rounded before they are multiplied, as a checkpoint may ask for (W8A8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Types that activations are rounded to, as torch names → the largest code."""


LEAST = -128.0
"""The smallest code of int8 with a zero point."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """x[t, c] ≈ (code[t, c] − zero[t, c // group]) · scale[t, c // group].

    type: of the codes, a key of LARGEST. They are the nearest ones, even ones in the middle. group:
    columns of a token that share a scale; 0 = all. scale: of all tokens and columns (static); None
    = the largest magnitude of the group divided by the largest code, and 1 if it is zero. Larger
    values become the largest code. is_symmetric: zero points are 0. Otherwise the type is int8, and
    its 256 codes are spread from the least to the largest value of the group, and 0 is one of them.
    zero: the zero point of a static scale. is_shared: all tokens of a step share what is computed
    for one, so a token depends on the others.
    """

    type: str
    group: int = 0
    scale: float | None = None
    is_symmetric: bool = True
    zero: int = 0
    is_shared: bool = False

    @property
    def is_simple(self) -> bool:
        """Whether there are no zero points, and tokens do not depend on each other."""
        return self.is_symmetric and not self.is_shared

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the codes of x [T, columns], and the scales and zero points, float32 [T,
        groups]."""
        columns = x.shape[1]
        group = self.group or columns
        groups = functional.pad(x.float(), (0, -columns % group)).unflatten(1, (-1, group))
        scales, zeros = self._scales(groups)
        numbers = groups / scales.unsqueeze(2)
        if self.type == "int8":
            numbers = numbers.round() + zeros.unsqueeze(2)
        most = LARGEST[self.type]
        codes = numbers.clamp(-most if self.is_symmetric else LEAST, most)
        return codes.flatten(1)[:, :columns].to(getattr(torch, self.type)), scales, zeros

    def _scales(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales and zero points of [T, groups, group]."""
        low = groups.amin(2)
        high = groups.amax(2)
        if self.scale is not None:
            return torch.full_like(low, self.scale), torch.full_like(low, self.zero)
        if self.is_shared and len(groups):
            low = low.amin().expand_as(low)
            high = high.amax().expand_as(high)
        most = LARGEST[self.type]
        if self.is_symmetric:
            scales = torch.maximum(high, -low) / most
            return scales.masked_fill(scales == 0, 1), torch.zeros_like(scales)
        low = low.clamp(max=0)
        scales = (high.clamp(min=0) - low) / (most - LEAST)
        scales = scales.masked_fill(scales == 0, 1)
        return scales, LEAST - (low / scales).round()

    def rounded(self, x: Tensor) -> Tensor:
        """Return what the codes of x [T, columns] stand for, in the type of x."""
        codes, *steps = self.quantize(x)
        scales, zeros = (
            each.repeat_interleave(self.group or x.shape[1], 1)[:, : x.shape[1]] for each in steps
        )
        return ((codes.float() - zeros) * scales).to(x.dtype)


def after_rounding(rounding: Rounding | None, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a product whose first argument is rounded before."""
    if rounding is None:
        return call
    return lambda x, *more: call(rounding.rounded(x), *more)
