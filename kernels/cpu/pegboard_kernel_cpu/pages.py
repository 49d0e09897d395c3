"""Memory in huge pages, of which a processor can address more at a time."""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch import Tensor

HUGE = 2 << 20
"""The bytes of a huge page, of x86 and of most Arm systems."""


def matrix(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return memory for a matrix, whose contents are undefined. If the system has huge pages for
    whoever asks ("madvise" in /sys/kernel/mm/transparent_hugepage/enabled), its whole huge pages
    are such."""
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # the kernel was built without them
        return torch.empty(shape, dtype=dtype)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE
    return memory[start : start + num_bytes].view(dtype).view(shape)
