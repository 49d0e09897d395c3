"""A segment of shared memory has the tensors one after the other, as they are in memory. Each
begins at a multiple of ALIGNMENT bytes. What they are is said elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

ALIGNMENT = 64
FOLDER = Path("/dev/shm")
"""Where the system keeps segments, by the names of `multiprocessing.shared_memory`."""

T = TypeVar("T")


def num_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Return the bytes of a tensor. dtype: torch name."""
    item: torch.dtype = getattr(torch, dtype)
    return item.itemsize * prod(shape)


def placed(sizes: Iterable[tuple[T, int]]) -> Iterator[tuple[T, int, int]]:
    """Yield each thing with its size and its offset in the segment, in bytes."""
    offset = 0
    for thing, size in sizes:
        yield thing, offset, size
        offset += -(-size // ALIGNMENT) * ALIGNMENT


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, which can be written to."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)
