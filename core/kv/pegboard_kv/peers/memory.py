"""The host memory that blocks are kept in, before and after they are exchanged. It imports no
torch."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque

ALIGNMENT = 64
"""Parts of an arena begin at multiples of so many bytes."""


def address_of(content: memoryview) -> int:
    """Return where a writable memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(content))


class Memory(ABC):
    """Gives parts of host memory. A part belongs to whoever has a view of it; without any it is
    free."""

    is_any = False
    """Whether blocks may be in any other host memory too, so that they need not be copied."""

    @abstractmethod
    def take(self, num_bytes: int) -> memoryview | None:
        """Return a part with any content, or None if none of this size is free. Any thread may call
        it."""


class AnyMemory(Memory):
    """The memory of the process."""

    is_any = True

    def take(self, num_bytes: int) -> memoryview:
        return memoryview((ctypes.c_ubyte * num_bytes)()).cast("B")


class Arena(Memory):
    """One memory of `num_bytes` from `address` on, for libraries that must know it before. The
    system gives it only when it is written. Raises OSError if there is not so much."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(-1, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._lock = threading.Lock()
        self._free = [(0, num_bytes)]  # parts (start, stop) in order, no two of them adjacent
        self._returned: deque[tuple[int, int]] = deque()  # append may happen anywhere, without lock

    def take(self, num_bytes: int) -> memoryview | None:
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._collect()
            fitting = (i for i, (start, stop) in enumerate(self._free) if stop - start >= size)
            i = next(fitting, None)
            if i is None:
                return None
            start, stop = self._free[i]
            self._free[i : i + 1] = [(start + size, stop)] if stop - start > size else []
        part = (ctypes.c_ubyte * num_bytes).from_buffer(self._map, start)
        # every view of the part keeps this object
        end = weakref.finalize(part, self._returned.append, (start, start + size))
        end.atexit = False
        return memoryview(part).cast("B")

    def _collect(self) -> None:
        """Make parts free that nobody has any more."""
        parts = self._free
        while self._returned:
            parts.append(self._returned.popleft())
        parts.sort()
        merged: list[tuple[int, int]] = []
        for start, stop in parts:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self._free = merged
