"""The files of a cache that later starts and other users read: they appear complete or not at all,
and they are used only if no other user can have changed them.

A file or folder is trusted if it belongs to this user or to root and only its owner may write to
it. A library of another user would run with the rights of this one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from pegboard.log import get_logger

log = get_logger(__name__)

SEAL = b"\npegboard sha256 "
_SEALED_BYTES = len(SEAL) + 64
_STALE_S = 3600.0
"""A temporary file of this age belongs to a process that was killed."""

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EFBIG: "the file would be larger than this process may write (ulimit -f)",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
}


class Damaged(ValueError):
    """The content of a file does not match its checksum."""


def explain(error: OSError) -> str:
    """Return in words why a file could not be written or read."""
    return _REASONS.get(error.errno or 0) or error.strerror or str(error)


@functools.lru_cache
def warn_once(message: str) -> None:
    """Log a warning. Each message is logged once per process."""
    log.warning("%s", message)


def check_owner(status: os.stat_result, path: Path) -> None:
    """Raises PermissionError if another user may have changed the file at `path`. status: its
    stat."""
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(
            f"{path} belongs to another user (number {status.st_uid}), so its content is not "
            "trusted"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(
            f"other users may change {path} (mode {mode:o}), so it is not trusted: run chmod go-w "
            f"{path}"
        )


def open_trusted(path: Path) -> int:
    """Open a file for reading and return its descriptor. Raises OSError if it cannot be opened or
    is no plain file, and PermissionError if the file or its folder is not trusted."""
    # a pipe would otherwise wait for its writer
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file", str(path))
        check_owner(path.parent.stat(), path.parent)
        check_owner(status, path)
    except BaseException:
        os.close(number)
        raise
    return number


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, readable by everybody whatever the umask is. Raises OSError
    if that fails, and PermissionError if a folder exists that is not trusted."""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            path.mkdir()
            path.chmod(0o755)
    check_owner(folder.stat(), folder)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(folder))


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let one process at a time work in a folder. The lock ends with the process. Where the file
    system has no locks, processes work side by side."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def check_room(folder: Path, num_bytes: int) -> None:
    """Raises OSError if files of this size can obviously not be written to the folder. Changes
    nothing."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if there == folder:
        check_owner(folder.stat(), folder)
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(there))
    system = os.statvfs(there)
    if system.f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, "read-only file system", str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "permission denied", str(there))
    if system.f_bavail * system.f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, "no space left on device", str(there))


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file that appears under `path` only when it is complete and on the disk. Everybody
    can read it. The folder itself is not flushed: after a power failure the file may be missing,
    but it is never half there. Raises OSError."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    try:
        with os.fdopen(number, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fchmod(number, 0o644)
            os.fsync(number)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_sealed(path: Path, content: bytes) -> None:
    """Write a file that ends with a checksum of its content. A shared library with such an end can
    be loaded as it is."""
    write_file(path, (content, SEAL, hashlib.sha256(content).hexdigest().encode()))


def read_sealed(path: Path) -> bytes:
    """Return the content of a file that `write_sealed` wrote. Raises Damaged if it is not that
    content, and OSError as `open_trusted` does."""
    with os.fdopen(open_trusted(path), "rb") as file:
        whole = file.read()
    content = whole[:-_SEALED_BYTES]
    seal = whole[-_SEALED_BYTES:]
    if seal != SEAL + hashlib.sha256(content).hexdigest().encode():
        raise Damaged(f"{path} is damaged: its checksum does not match its content")
    return content


def sweep(folder: Path, pattern: str) -> None:
    """Delete temporary files and folders that killed processes left."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < time.time() - _STALE_S:
                for inner in path.iterdir() if path.is_dir() else ():
                    inner.unlink()
                path.rmdir() if path.is_dir() else path.unlink()
