"""The compiled library for this machine's level, and the team of threads that runs its kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_int, c_int64, c_void_p
from pathlib import Path

from pegboard.errors import ConfigError
from pegboard.log import get_logger
from pegboard_kernel_cpu.build import best_compiled, compiled
from pegboard_kernel_cpu.structures import CodeFormat, Format, Instruction, InstructionList, Step

log = get_logger(__name__)


class NotLoadable(ConfigError):
    """The system does not load a library, although it is whole: its folder allows no programs, or
    it is from another system."""


class Library:
    """The kernels of one level. num_threads: size of the team, including the calling thread.
    has_tiles: whether products with many tokens read activations as bfloat16 numbers."""

    def __init__(self, level: str, path: str | Path, num_threads: int) -> None:
        """Load the library and start the team. Raises NotLoadable if the system does not load it,
        and ConfigError if the system refuses a permission that this level needs."""
        self.level = level
        try:
            self._functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise NotLoadable(f"the compiled CPU kernels cannot be loaded: {error}") from error
        self._addresses: dict[str, int] = {}
        functions = self._functions
        self.has_tiles = hasattr(functions, "allow_tiles")
        if self.has_tiles and not functions.allow_tiles():
            raise ConfigError(
                "the operating system does not let this process use matrix tiles: AMX needs Linux "
                "5.16 or newer"
            )
        functions.team_create.restype = c_void_p
        functions.team_create.argtypes = (c_int,)
        functions.team_run.restype = None
        functions.team_run.argtypes = (c_void_p, InstructionList, c_int64, ctypes.POINTER(Step))
        functions.team_stop.restype = None
        functions.team_stop.argtypes = (c_void_p,)
        functions.team_size.restype = c_int
        functions.team_size.argtypes = (c_void_p,)
        sizes = (c_void_p, c_int64, c_int64, c_int64, c_void_p)
        functions.pack_linear_float.argtypes = functions.unpack_linear_float.argtypes = sizes
        functions.pack_blocks.argtypes = (
            *(c_void_p,) * 4,
            *(c_int64,) * 3,
            ctypes.POINTER(Format),
            c_void_p,
        )
        functions.pack_codes.argtypes = (
            *(c_void_p,) * 3,
            *(c_int64,) * 3,
            ctypes.POINTER(CodeFormat),
            c_void_p,
        )
        functions.collective_bytes.restype = c_int64
        functions.collective_bytes.argtypes = (c_int64,)
        self.size_of_collective = functions.collective_bytes
        self.pack_linear_float = functions.pack_linear_float
        self.unpack_linear_float = functions.unpack_linear_float
        self.pack_blocks = functions.pack_blocks
        self.pack_codes = functions.pack_codes
        self._run = functions.team_run
        self._team = functions.team_create(num_threads)
        if not self._team:
            raise MemoryError("not enough memory for the kernel threads")
        self.num_threads: int = functions.team_size(self._team)

    def constant(self, name: str) -> int:
        """Return a 64-bit integer, given its C name."""
        return c_int64.in_dll(self._functions, name).value

    def address(self, kernel: str) -> int:
        """Return the address of a kernel, given its C name."""
        if kernel not in self._addresses:
            self._addresses[kernel] = (
                ctypes.cast(getattr(self._functions, kernel), c_void_p).value or 0
            )
        return self._addresses[kernel]

    def instructions(
        self, calls: Sequence[tuple[str, ctypes.Structure]]
    ) -> ctypes.Array[Instruction]:
        """Return the calls as a list for `run`. The structures must outlive it."""
        return (Instruction * len(calls))(
            *((self.address(kernel), ctypes.addressof(arguments)) for kernel, arguments in calls)
        )

    def run(self, instructions: ctypes.Array[Instruction], count: int, num_tokens: int) -> None:
        """Run the first `count` instructions, each on all threads, for a step of `num_tokens`
        tokens. Other Python threads can run in the meantime."""
        self._run(self._team, instructions, count, byref(Step(num_tokens)))

    def team_run(self, calls: Sequence[tuple[str, ctypes.Structure]], num_tokens: int) -> None:
        """Run these kernels once."""
        self.run(self.instructions(calls), len(calls), num_tokens)

    def stop(self) -> None:
        """End the team's threads."""
        self._functions.team_stop(self._team)


_current: Library | None = None


def library() -> Library:
    """Return the library of this process. It is compiled and started at first use, with as many
    threads as the platform gave torch."""
    global _current
    if _current is None:
        import torch  # imported here, because a trial of the library does not need it

        _current = _best(torch.get_num_threads())
    return _current


def _best(num_threads: int) -> Library:
    """Load the best level that works in this process. A level may fail here after its trial,
    because this process may have fewer permissions than the one that tried it."""
    refused: list[str] = []
    avoided: list[Path] = []
    while True:
        level, path = best_compiled(refused, avoided)
        try:
            return Library(level, path, num_threads)
        except NotLoadable as error:
            log.warning("%s; trying another folder", error)
            avoided.append(path.parent)
        except ConfigError as error:
            if level in refused:  # the last one that is left
                raise
            log.warning("skipping kernels of level %s: %s", level, error)
            refused.append(level)


@contextmanager
def using(level: str, num_threads: int) -> Iterator[Library]:
    """Compute with another level or team inside a `with` statement, for tests and measurements."""
    global _current
    before = _current
    _current = Library(level, compiled(level), num_threads)
    try:
        yield _current
    finally:
        _current.stop()
        _current = before
