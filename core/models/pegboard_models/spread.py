"""The learned positions of images of any shape, which each image is spread over."""

from __future__ import annotations

import torch
from torch import Tensor


def spread_places(height: int, width: int, grid: int, like: Tensor) -> Tensor:
    """Return the number of the learned position of each patch, int64 [height · width]. grid: the
    learned positions of a side. like: on the device of the result. As in Idefics 2 (Laurençon et
    al. 2024)."""
    limits = torch.arange(1 / grid, 1.0, 1 / grid, device=like.device)
    lines, columns = (
        torch.bucketize(
            (torch.arange(count, device=like.device) * (1.0 / torch.tensor(count))).clamp(
                max=1.0 - 1e-6
            ),
            limits,
            right=True,
        )
        for count in (height, width)
    )
    return (lines[:, None] * grid + columns).flatten()
