"""Gives memory back to the operating system after large requests. The C library keeps freed memory
for itself, because it usually needs it again soon; after a few large bodies that would be hundreds
of megabytes for the rest of the server's life.

glibc has an arena for each thread, up to eight for each processor. It never gives back what is free
at the end of an arena of a thread, unless that is more than a threshold, which grows to twice the
largest block that was ever freed. Therefore there are few arenas here, and the threshold is
fixed."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

LARGE_BYTES = 1024 * 1024
"""Memory is given back when the bodies of finished requests add up to this many bytes."""

DELAY_S = 1.0
"""How long to wait, so that memory is given back only once after a series of large requests."""


MAX_ARENAS = 2
THRESHOLD_BYTES = 256 * 1024
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8  # of malloc.h


def _library(function: str) -> Callable[..., int] | None:
    """Returns a function of glibc, or None with another C library. It lets other threads run
    meanwhile."""
    try:
        call: Callable[..., int] = getattr(ctypes.CDLL(None), function)
    except (AttributeError, OSError):
        return None
    return call


def few_arenas() -> None:
    """Make all threads of this process share few arenas. Called before it has many threads."""
    if (mallopt := _library("mallopt")) is not None:
        mallopt(M_ARENA_MAX, MAX_ARENAS)


def keep_little() -> None:
    """Make the C library also give back each large block when it is freed. This is too slow for a
    process that computes."""
    few_arenas()
    if (mallopt := _library("mallopt")) is not None:
        mallopt(M_TRIM_THRESHOLD, THRESHOLD_BYTES)
        mallopt(M_MMAP_THRESHOLD, THRESHOLD_BYTES)


class FreedMemory:
    """Counts the bytes of finished requests. Used on one event loop."""

    def __init__(self, trim: Callable[[int], int] | None = None, delay_s: float = DELAY_S) -> None:
        self._trim = trim or _library("malloc_trim")
        self._delay_s = delay_s
        self._num_bytes = 0
        self._is_due = False

    def add(self, num_bytes: int) -> None:
        """Count a finished request whose body had `num_bytes`."""
        self._num_bytes += num_bytes
        if self._num_bytes >= LARGE_BYTES and not self._is_due and self._trim is not None:
            self._is_due = True
            asyncio.get_running_loop().call_later(self._delay_s, self._give_back)

    def _give_back(self) -> None:
        self._num_bytes = 0
        self._is_due = False
        assert self._trim is not None, "checked before"
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0)
