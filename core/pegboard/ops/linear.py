"""Multiplying with a plain weight matrix."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional


def bind_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The callable [T, in] → [T, out] for a weight [out, in] whose address stays."""
    linear = functional.linear
    return lambda x: linear(x, weight)
