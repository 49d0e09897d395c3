"""The ranks of one host exchange tensors through memory that they share (csrc/collective.c)."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import addressof, c_char
from pathlib import Path

import torch
from torch import Tensor

from pegboard.errors import ConfigError, EngineDeadError
from pegboard.interfaces.collective import CollectiveSetup
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.structures import Exchange, Member
from pegboard_kernel_cpu.values import Call, new, rows_of, submit

FOLDER = Path("/dev/shm")
POLL_S = 0.001
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""dtype → Type of csrc/collective.c."""

CALLS = ("all_reduce", "all_gather", "broadcast")
"""In the order of Kind in csrc/collective.c."""
CALL = 62
"""The bit of a failure from which on it says the call."""


class SharedMemoryCollective:
    """Implements `pegboard.interfaces.collective.Collective`. Calls on stand-ins are recorded.

    The memory is a file that has no name any more when the constructor returns, so that nothing
    remains of ranks that are killed."""

    def __init__(self, options: None, setup: CollectiveSetup) -> None:
        """Wait for all ranks. Raises EngineDeadError if one does not come in time, and ConfigError
        if there are too many of them or the memory cannot be had."""
        most = library().constant("collective_max_ranks")
        if len(setup.ranks) > most:
            raise ConfigError(
                f"group {setup.group!r} has {len(setup.ranks)} ranks; shared_memory takes at most "
                f"{most}"
            )
        self._group: Group | None = Group(setup)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective.all_reduce`. x [T, …]: float32, bfloat16 or float16; the sums of the last
        two are rounded once. They are written to x if its rows are contiguous."""
        if x.dtype not in TYPES:
            raise ConfigError(
                f"all_reduce got {x.dtype}; shared_memory adds float32, bfloat16 and float16"
            )
        if not x.numel():
            return x
        rows = rows_of(x)
        self._submit("all_reduce", rows, rows, TYPES[x.dtype])
        return rows if x.dim() == 2 else rows.view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Collective.all_gather`. x [T, n] may have any dtype."""
        group = self._live("all_gather")
        rows = rows_of(x)
        out = new(rows, rows.shape[1] * group.member.ranks, rows.dtype)
        if x.numel():
            self._submit("all_gather", rows, out, 0)
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See `Collective.broadcast`. x [T, …] may have any dtype. The source does not wait for the
        others before they lag half a MiB behind. The rest of the tensor waits then."""
        rows = rows_of(x)
        if x.numel():
            self._submit("broadcast", rows, rows, 0, source)
        return rows if x.dim() == 2 else rows.view(x.shape)

    def close(self) -> None:
        """The memory is freed when no recording holds it any more."""
        self._group = None

    def _live(self, call: str) -> Group:
        if self._group is None:
            raise EngineDeadError(f"{call} was called on a group of ranks that is closed")
        return self._group

    def _submit(self, kernel: str, rows: Tensor, out: Tensor, type_: int, source: int = 0) -> None:
        group = self._live(kernel)
        arguments = Exchange(
            member=addressof(group.member),
            columns=rows.shape[1],
            item=rows.element_size(),
            type=type_,
            source=source,
        )
        submit(rows, Call(kernel, arguments, {"x": rows}, {"out": out}, check=group.check))


class Group:
    """The memory of a group, as one rank sees it."""

    def __init__(self, setup: CollectiveSetup) -> None:
        self.setup = setup
        self._memory = _joined(setup)
        self._start = c_char.from_buffer(self._memory, mmap.PAGESIZE)
        self.member = Member(
            shared=addressof(self._start),
            rank=setup.rank,
            ranks=len(setup.ranks),
            timeout=round(setup.timeout_s * 1e9),
        )
        self._failure = memoryview(self._memory)[mmap.PAGESIZE : mmap.PAGESIZE + 8].cast("Q")

    def check(self) -> None:
        """Raise EngineDeadError if a rank did not come in time, now or in an earlier call."""
        failure = self._failure[0]
        if failure:
            call = CALLS[failure >> CALL]
            absent = [place for place in range(len(self.setup.ranks)) if failure >> place & 1]
            raise _did_not_come(self.setup, call, absent)


def _did_not_come(setup: CollectiveSetup, call: str, absent: list[int]) -> EngineDeadError:
    """absent: the places in the group of the ranks that did not come."""
    ranks = ", ".join(str(setup.ranks[place]) for place in absent)
    return EngineDeadError(
        f"group {setup.group!r}: {call} waited for {setup.timeout_s:g} s, and these ranks did not "
        f"come: {ranks}"
    )


def _joined(setup: CollectiveSetup) -> mmap.mmap:
    """Return the memory of the group, which all ranks have mapped. In its first page, each rank has
    a byte that says so."""
    path = _place(setup)
    size = _size(setup)
    deadline = time.monotonic() + setup.timeout_s
    with _created(path, size) if setup.rank == 0 else _found(path, size, deadline) as file:
        if file is None:
            raise _did_not_come(setup, "the start", [0])
        memory = mmap.mmap(file, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        memory[setup.rank] = 1
        while not all(came := memory[: len(setup.ranks)]):
            if time.monotonic() > deadline:
                absent = [place for place, has_come in enumerate(came) if not has_come]
                raise _did_not_come(setup, "the start", absent)
            time.sleep(POLL_S)
    return memory


def _place(setup: CollectiveSetup) -> Path:
    digest = hashlib.sha256(repr((setup.address, setup.group, setup.ranks)).encode()).hexdigest()
    return FOLDER / f"pegboard-{digest[:32]}"


def _size(setup: CollectiveSetup) -> int:
    return mmap.PAGESIZE + int(library().size_of_collective(len(setup.ranks)))


@contextmanager
def _created(path: Path, size: int) -> Iterator[int]:
    """Yield a new file that is locked, and whose name is gone afterwards. A file that nobody locks
    is left from a rank that was killed, and is replaced."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            file = os.open(path, flags, 0o600)
        except FileExistsError:
            _remove_abandoned(path)
            file = os.open(path, flags, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: ranks cannot share memory: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            raise ConfigError(
                f"{FOLDER} has no room for the {size >> 10} KiB that ranks share: "
                f"{error.strerror}; mount it with more"
            ) from error
        yield file
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def _remove_abandoned(path: Path) -> None:
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_abandoned(file):
            raise ConfigError(f"{path}: another group of ranks has the same name and address")
        path.unlink()
    finally:
        os.close(file)


@contextmanager
def _found(path: Path, size: int, deadline: float) -> Iterator[int | None]:
    """Wait for the file of the first rank and yield it; None if it does not come in time."""
    file = _open_found(path, size)
    while file is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
        file = _open_found(path, size)
    try:
        yield file
    finally:
        if file is not None:
            os.close(file)


def _open_found(path: Path, size: int) -> int | None:
    """Return the file, if it has its full size, belongs to this user and its maker lives."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    facts = os.fstat(file)
    if facts.st_size == size and facts.st_uid == os.geteuid() and not _is_abandoned(file):
        return file
    os.close(file)
    return None


def _is_abandoned(file: int) -> bool:
    """Return whether no process that lives has made the file: its maker has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True
