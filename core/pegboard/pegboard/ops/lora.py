"""Low-rank adapters (Hu et al. 2021): y += B A x, with an adapter slot per token. Slot 0 holds zeros."""

from __future__ import annotations

import torch
from torch import Tensor


def lora_shrink(x: Tensor, a: Tensor, slots: Tensor) -> Tensor:
    """Multiply row t with a[slots[t]]: x [T, in], a [slots, rank, in], slots [T] → [T, rank]."""
    out = x.new_zeros(x.shape[0], a.shape[1])
    for slot in torch.unique(slots).tolist():
        if slot:
            rows = slots == slot
            out[rows] = x[rows] @ a[slot].T
    return out


def lora_expand(y: Tensor, shrunk: Tensor, b: Tensor, slots: Tensor) -> Tensor:
    """y [T, out] += shrunk [T, rank] · b[slots[t]]ᵀ, with b [slots, out, rank]. Changes y in place and returns it."""
    for slot in torch.unique(slots).tolist():
        if slot:
            rows = slots == slot
            y[rows] += shrunk[rows] @ b[slot].T
    return y
