"""Arrays of the host, copied to the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.platform import Copies


class Upload:
    """upload(array) → the same numbers on the device. copies: None if the device computes in the
    host's memory. Otherwise the array is first copied to pinned memory, and nothing waits for the
    device."""

    def __init__(self, device: str, copies: Copies | None) -> None:
        self.device = device
        self.copies = copies

    def __call__(self, array: np.ndarray) -> Tensor:
        source = torch.from_numpy(array)
        if self.copies is None:
            return source.to(self.device)
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        if source.numel():
            pinned = self.copies.host(tuple(source.shape), source.dtype)
            pinned.numpy()[...] = array
            self.copies.upload(pinned, target)
        return target
