"""Gated activations of the feed-forward block."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(x: Tensor) -> Tensor:
    """[T, 2F] holding gate and up side by side → silu(gate) * up [T, F]. (SwiGLU, Shazeer 2020.)"""
    half = x.shape[-1] // 2
    return functional.silu(x[..., :half]).mul_(x[..., half:])


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """[T, 2F] → gelu(gate, tanh approximation) * up [T, F]."""
    half = x.shape[-1] // 2
    return functional.gelu(x[..., :half], approximate="tanh").mul_(x[..., half:])
