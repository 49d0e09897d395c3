"""Normalisation over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[…, size] → x / sqrt(mean(x²) + eps) * weight, in float32 inside. (Zhang & Sennrich 2019.)"""
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[…, size] twice → (rms_norm(x + residual), x + residual). `residual` is overwritten with the sum and returned."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """[…, size] → (x − mean) / sqrt(var + eps) * weight + bias. (Ba et al. 2016.)"""
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)
