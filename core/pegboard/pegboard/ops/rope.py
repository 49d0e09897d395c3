"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """Rotate the first 2·R of the D channels of every head, and copy the others. x: [T, heads, D].
    cos, sin: [T, R] float32.

    With pairs=False, channel i is rotated with i + R (Hugging Face checkpoints). With pairs=True,
    channel 2i is rotated with 2i + 1 (the paper, and Llama weights as GGUF stores them). Returns a
    new tensor of x's shape.
    """
    rotary = 2 * cos.shape[-1]
    head = x[..., :rotary]
    turned = _turn_pairs(head, cos, sin) if pairs else _turn_halves(head, cos, sin)
    return turned if rotary == x.shape[-1] else torch.cat([turned, x[..., rotary:]], -1)


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighboring channels. A pair is a complex number and its rotation a product,
    which is several times faster than strided halves."""
    pairs = x.float().unflatten(-1, (-1, 2))
    if pairs.storage_offset() % 2 or any(stride % 2 for stride in pairs.stride()[:-1]):
        # complex numbers start at even offsets
        pairs = pairs.clone(memory_format=torch.contiguous_format)
    turned = torch.view_as_complex(pairs) * torch.complex(cos, sin).unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def _turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos = cos.unsqueeze(1).to(x.dtype)
    sin = sin.unsqueeze(1).to(x.dtype)
    (first, second) = x.chunk(2, -1)
    out = torch.empty_like(x)
    turned_first, turned_second = out.chunk(2, -1)
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin)
    return out
