"""The folder of a Ray that the engine starts. Its owner locks it, and the lock ends with the
process. So a folder whose owner was killed is found and removed at the next start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "pegboard-ray-"
LOCK = "lock"
LONGEST = 20
"""Bytes of the path that the folder may be in: the paths of Ray's sockets in it have 86 more, and
the system takes 107."""


def place() -> Path:
    """Return where temporary files are, or /tmp if that path is too long for Ray."""
    path = tempfile.gettempdir()
    return Path(path if len(os.fsencode(path)) <= LONGEST else "/tmp")


class RayFolder:
    """A new folder for temporary files. path: where it is."""

    def __init__(self) -> None:
        remove_ownerless()
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=place())
        new = Path(self.path) / "new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(new.with_name(LOCK))  # nobody sees it unlocked

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_ownerless() -> None:
    """Remove the folders of this user whose owners have ended."""
    for folder in place().glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # it is another user's, or is just being made
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.lstat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # its owner lives
            pass
        finally:
            os.close(lock)
