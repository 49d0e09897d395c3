"""A lock file between processes. The operating system releases it when its holder dies, so it is
never stale."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.1

if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold `path` (created if missing, never deleted) exclusively. While waiting, calls `on_wait`
    about ten times a second."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not _try_lock(handle):
            on_wait()
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(handle)  # this also unlocks
