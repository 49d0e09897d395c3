"""Gives whole pages of tensors back to the system, and fills them again. Their addresses stay
mapped meanwhile."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pegboard.errors import ConfigError
from pegboard.log import get_logger

if TYPE_CHECKING:
    import torch

log = get_logger(__name__)

PAGE = mmap.PAGESIZE

ON_DISK = "/var/tmp"
"""Temporary files that outlive a restart of the system, which therefore are on a disk."""

MOST_BYTES = 1 << 30
"""The largest number of bytes of one read or write; Linux transfers at most 2 GiB."""

Range = tuple[int, int]
"""The first address, and the address after the last one."""


def release(tensors: Iterable[torch.Tensor], *, keep: bool) -> Callable[[], None]:
    """Drop the whole pages of the tensors' storages. Other memory may share the first and the last
    page, so these stay.

    keep: the pages are first written to a temporary file without a name, on a disk if there is one
    (`saving_folder`). Pages of a mapped file
    that nobody has written to need no copy, because the system reads them from their file again.
    The returned function reads the temporary file back. It keeps the storages alive, so that
    nothing else is at their addresses then. Raises ConfigError if there is no room for the file;
    all pages are still there then.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    ranges = list(_whole_pages(storages))
    mapped = _unwritten_files() if keep else []
    kept = (
        [
            part
            for part in ranges
            if not any(start <= part[0] and part[1] <= stop for start, stop in mapped)
        ]
        if keep
        else []
    )
    file = _save(kept) if kept else None
    for start, stop in ranges:
        _drop(start, stop - start)

    def restore() -> None:
        if file is not None:
            with file:
                for start, stop in kept:
                    _read(file, _memory(start, stop))
        storages.clear()

    return restore


def _whole_pages(storages: Iterable[torch.UntypedStorage]) -> Iterator[Range]:
    """Yield the whole pages of the storages in ascending order. The ranges do not overlap."""
    last = 0
    for first, end in sorted(
        (storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages
    ):
        start = max(-(-first // PAGE) * PAGE, last)
        stop = end // PAGE * PAGE
        if start < stop:
            yield start, stop
            last = stop


def _unwritten_files() -> list[Range]:
    """Return the mappings of files in which every page is still the file's."""
    ranges: list[Range] = []
    current: Range | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            start, stop = (int(address, 16) for address in name.split("-"))
            current = (start, stop) if values[3] != "0" else None
        elif name == "Anonymous:" and values[0] == "0" and current is not None:
            ranges.append(current)
    return ranges


def _save(ranges: Sequence[Range]) -> IO[bytes]:
    # closed when the memory is filled again
    folder = saving_folder(Path("/proc/self/mountinfo").read_text())
    file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115
    try:
        for start, stop in ranges:
            view = _memory(start, stop)
            while view:
                view = view[file.write(view[:MOST_BYTES]) :]
        file.seek(0)
    except OSError as error:
        file.close()
        num_bytes = sum(stop - start for start, stop in ranges)
        advice = "set TMPDIR to a folder with more room, or use sleep level 2"
        raise ConfigError(
            f"{num_bytes / 2**20:.0f} MiB of weights cannot be saved in {folder} ({error}); "
            f"{advice}"
        ) from error
    return file


def saving_folder(mounts: str) -> str:
    """Return the folder for temporary files, or /var/tmp if the first is in memory and the second
    is not: what is written to memory frees none. mounts: lines of /proc/self/mountinfo."""
    folder = tempfile.gettempdir()
    if not is_memory(folder, mounts):
        return folder
    if os.access(ON_DISK, os.W_OK) and not is_memory(ON_DISK, mounts):
        return ON_DISK
    log.warning(
        "the weights of the sleeping engine stay in memory, because %s is a file system in memory; "
        "set TMPDIR to a folder on a disk",
        folder,
    )
    return folder


def is_memory(folder: str, mounts: str) -> bool:
    """Return whether a folder is in a file system in memory."""
    path = os.path.realpath(folder)
    longest = ""
    kind = ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        is_above = path == point or path.startswith(f"{point.rstrip('/')}/")
        # the last mount at a place hides those before it
        if is_above and len(point) >= len(longest):
            longest = point
            kind = after.split()[0]
    return kind in ("tmpfs", "ramfs")


def _read(file: IO[bytes], view: memoryview) -> None:
    while view:
        count = os.readv(file.fileno(), [view[:MOST_BYTES]])
        if not count:
            raise EOFError("the file with the saved weights has become shorter")
        view = view[count:]


def _memory(start: int, stop: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * (stop - start)).from_address(start)).cast("B")


def _drop(start: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "the system does not take the pages back")
