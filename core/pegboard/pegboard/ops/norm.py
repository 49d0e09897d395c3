"""Normalization over the last dimension."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[…, size] → x / sqrt(mean(x²) + eps) * weight, computed in float32 (Zhang & Sennrich
    2019)."""
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(_epsilon(eps, x.device), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).mul_(weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual […, size] → (rms_norm(x + residual), x + residual). `residual` is overwritten
    with the sum and returned."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """[…, size] → (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, computed in float32 (Ba et
    al. 2016). bias: None = 0."""
    wide_bias = None if bias is None else bias.float()
    return functional.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(
        x.dtype
    )


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """x, residual […, size] → (layer_norm(x + residual), x + residual). `residual` is overwritten
    with the sum and returned."""
    residual.add_(x)
    return layer_norm(residual, weight, bias, eps), residual


@lru_cache(maxsize=64)
def _epsilon(eps: float, device: torch.device) -> Tensor:
    """Return eps as a tensor, because a Python number in a small op takes as long as the op."""
    with torch.inference_mode(False):
        return torch.full((), eps, dtype=torch.float32, device=device)
