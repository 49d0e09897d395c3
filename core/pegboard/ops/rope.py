"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """Rotate the first 2·R of D channels of every head; the rest passes.

    x: [T, heads, D]; cos, sin: [T, R] float32. pairs=False rotates channel i with i + R (Hugging Face checkpoints);
    pairs=True rotates 2i with 2i + 1 (the paper; Llama weights as GGUF stores them). Returns a tensor of x's shape; x may
    be overwritten.
    """
    rotary = 2 * cos.shape[-1]
    head = x[..., :rotary]
    if pairs:
        first, second = head[..., 0::2], head[..., 1::2]
    else:
        first, second = head[..., : rotary // 2], head[..., rotary // 2 :]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if x.dtype != torch.float32:
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    out = x if rotary == x.shape[-1] else x.clone()
    turned_first = first * cos
    turned_first.addcmul_(second, sin, value=-1)
    turned_second = second * cos
    turned_second.addcmul_(first, sin)
    if rotary == x.shape[-1]:
        out = torch.empty_like(x)
    if pairs:
        out[..., 0:rotary:2] = turned_first
        out[..., 1:rotary:2] = turned_second
    else:
        out[..., : rotary // 2] = turned_first
        out[..., rotary // 2 : rotary] = turned_second
    return out
