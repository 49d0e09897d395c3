"""Which rows of a step use which adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pegboard.ops import AdapterRows


class Buffer(Protocol):
    """As `step_inputs.Buffer`."""

    array: np.ndarray
    on_device: Tensor

    def sent(self, *extents: int) -> Tensor: ...


class AdapterGroups:
    """Groups rows by the adapter that they use. rows: for the ops, in buffers that keep their
    addresses."""

    def __init__(self, order: Buffer, starts: Buffer) -> None:
        self.order = order
        self.starts = starts
        self.rows = self._buffers = AdapterRows(order.on_device, starts.on_device)

    def fill(self, slots: np.ndarray) -> None:
        """Group rows with these slots [T]."""
        self.rows = self._buffers
        self.order.array[: len(slots)] = np.argsort(slots, kind="stable")
        np.cumsum(
            np.bincount(slots, minlength=len(self.starts.array) - 1), out=self.starts.array[1:]
        )
        self.order.sent(len(slots))
        self.starts.sent(len(self.starts.array))

    @contextmanager
    def only(self, slot: int, num_rows: int) -> Iterator[None]:
        """Compute `num_rows` rows with one slot in the block, in memory of their own."""
        order, starts = self.rows
        bounds = torch.arange(len(starts), dtype=torch.int32).gt(slot).int() * num_rows
        self.rows = AdapterRows(
            torch.arange(num_rows, dtype=torch.int32, device=order.device), bounds.to(starts.device)
        )
        yield
        self.rows = self._buffers
