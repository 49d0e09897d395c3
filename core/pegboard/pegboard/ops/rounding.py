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


@dataclass(frozen=True, slots=True)
class Rounding:
    """x[t, c] ≈ code[t, c] · scale[t, c // group].

    type: of the codes, a key of LARGEST. They are the nearest ones, even ones in the middle. group:
    columns of a token that share a scale; 0 = all. scale: of all tokens and columns (static); None
    = the largest magnitude of the group divided by the largest code, and 1 if it is zero. Larger
    values become the largest code.
    """

    type: str
    group: int = 0
    scale: float | None = None

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of x [T, columns], and the scales, float32 [T, groups]."""
        columns = x.shape[1]
        group = self.group or columns
        groups = functional.pad(x.float(), (0, -columns % group)).unflatten(1, (-1, group))
        most = LARGEST[self.type]
        scales = groups.abs().amax(2) / most
        scales = scales.masked_fill(scales == 0, 1)
        if self.scale is not None:
            scales = torch.full_like(scales, self.scale)
        codes = (groups / scales.unsqueeze(2)).clamp(-most, most).flatten(1)[:, :columns]
        return (codes.round() if self.type == "int8" else codes).to(
            getattr(torch, self.type)
        ), scales

    def rounded(self, x: Tensor) -> Tensor:
        """Return what the codes of x [T, columns] stand for, in the type of x."""
        codes, scales = self.quantize(x)
        spread = scales.repeat_interleave(self.group or x.shape[1], 1)[:, : x.shape[1]]
        return (codes.float() * spread).to(x.dtype)


def after_rounding(rounding: Rounding | None, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a product whose first argument is rounded before."""
    if rounding is None:
        return call
    return lambda x, *more: call(rounding.rounded(x), *more)
