"""A SwiGLU whose inputs are clamped, the activation of gpt-oss' experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """See `pegboard.layers.experts.ExpertActivation`. alpha, limit: see `clamped_swiglu`."""

    alpha: float
    limit: float

    def bind(
        self, kernels: Mapping[str, Callable[..., Any]], is_interleaved: bool
    ) -> Callable[[Tensor], Tensor]:
        return partial(
            kernels["clamped_swiglu"],
            alpha=self.alpha,
            limit=self.limit,
            interleaved=is_interleaved,
        )


def clamped_swiglu(x: Tensor, alpha: float, limit: float, interleaved: bool) -> Tensor:
    """gate · sigmoid(alpha · gate) · (up + 1) with gate ≤ limit and |up| ≤ limit, which are
    clamped: [T, 2F] → [T, F].

    interleaved: gate and up alternate; otherwise up follows gate.
    """
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)
