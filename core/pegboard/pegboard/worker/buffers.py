"""Memory that keeps its address, which steps are sent to the device in."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.platform import Copies


def sent_once(array: np.ndarray, device: str, copies: Copies | None) -> Tensor:
    """Return an array on the device, in memory of its own. The host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    if copies is None:
        return tensor
    host = copies.host(array.shape, tensor.dtype)
    host.copy_(tensor)
    target = torch.empty(array.shape, dtype=tensor.dtype, device=device)
    copies.upload(host, target)
    return target


class Buffer:
    """An array that the host fills, and its tensor on the device. If the device computes in the
    host's memory, both are the same memory. Otherwise the host has two arrays and alternates, so
    that it can fill one while the other is still being copied."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: str, copies: Copies | None
    ) -> None:
        self.copies = copies
        self.hosts = (
            [torch.zeros(shape, dtype=dtype)]
            if copies is None
            else [copies.host(shape, dtype) for _ in range(2)]
        )
        self.on_device = (
            self.hosts[0] if copies is None else torch.zeros(shape, dtype=dtype, device=device)
        )
        self.arrays = [host.numpy() for host in self.hosts]
        self.array = self.arrays[0]
        self.half = 0
        self._extents = shape
        self._view = self.on_device

    def take(self, half: int) -> None:
        """Fill this half from now on."""
        self.array = self.arrays[half]
        self.half = half

    def sent(self, *extents: int) -> Tensor:
        """Return the first part of the buffer on the device, after copying it there if necessary.
        Most steps have the same size as the previous one and reuse its view: making a view takes
        microseconds, and lets another thread take the interpreter lock."""
        if extents != self._extents:
            self._extents, self._view = extents, self.on_device[tuple(map(slice, extents))]
        if self.copies is not None:
            self.copies.upload(self.hosts[self.half][tuple(map(slice, extents))], self._view)
        return self._view
