"""Gives memory back to the operating system after large requests. The C library keeps freed memory for itself, because it usually
needs it again soon; after a few large bodies that would be hundreds of megabytes for the rest of the server's life."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

LARGE_BYTES = 1024 * 1024
"""Memory is given back when the bodies of finished requests add up to this many bytes."""

DELAY_S = 1.0
"""How long to wait, so that memory is given back only once after a series of large requests."""


def _trim() -> Callable[[int], int] | None:
    """Returns glibc's `malloc_trim`, or None with another C library. It lets other threads run meanwhile."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None


class FreedMemory:
    """Counts the bytes of finished requests. Used on one event loop."""

    def __init__(self, trim: Callable[[int], int] | None = None, delay_s: float = DELAY_S) -> None:
        self._trim = trim or _trim()
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
        self._num_bytes, self._is_due = 0, False
        assert self._trim is not None, "checked before"
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0)
