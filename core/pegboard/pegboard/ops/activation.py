"""Gated activations of the feed-forward block."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) * up (SwiGLU, Shazeer 2020): [T, 2F], which holds gate and then up, → [T, F]."""
    half = x.shape[-1] // 2
    return functional.silu(x[..., :half]).mul_(x[..., half:])


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """gelu(gate, tanh approximation) * up: [T, 2F] → [T, F]."""
    half = x.shape[-1] // 2
    return functional.gelu(x[..., :half], approximate="tanh").mul_(x[..., half:])
