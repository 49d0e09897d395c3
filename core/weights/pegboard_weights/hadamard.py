"""The fast Walsh-Hadamard transform."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(x: Tensor, size: int) -> Tensor:
    """x · H / √size for every `size` consecutive columns: [T, n] → [T, n].

    size is a power of two that divides n. H is Sylvester's matrix: H₁ = 1, H₂ₖ = (Hₖ Hₖ; Hₖ −Hₖ).
    The transform is its own inverse. It takes n · log₂ size additions, and no memory for a matrix.
    """
    out = x
    width = 1
    while width < size:
        pairs = out.reshape(len(x), -1, 2, width)
        low = pairs[:, :, 0]
        high = pairs[:, :, 1]
        out = torch.stack((low + high, low - high), 2)
        width = 2 * width
    return out.reshape(x.shape) * size**-0.5
