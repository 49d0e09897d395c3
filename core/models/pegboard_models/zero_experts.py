"""Experts that return their input (LongCat-Flash, Meituan LongCat Team 2025). A router may choose
them like the others."""

from __future__ import annotations

import torch
from torch import Tensor


def zero_experts(weights: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Separate the choices of zero experts: weights float32 [T, k] and ids int32 [T, k], of which
    those from num_experts on are zero experts → the weights and ids of the others, and the sum of a
    token's weights of zero experts, float32 [T, 1].

    A choice of a zero expert gets the weight 0. It goes to the token's best expert, so that no
    weights are read only for it, or to the last expert if the token has none.
    """
    is_real = ids < num_experts
    best = ids.gather(1, is_real.int().argmax(1, keepdim=True)).clamp(max=num_experts - 1)
    kept = weights.masked_fill(is_real, 0).sum(1, keepdim=True)
    return weights.masked_fill(~is_real, 0), torch.where(is_real, ids, best), kept
