"""Compiles the C sources for one level of CPU features, once, into the cache.

A level is a set of compiler switches. The whole library is compiled for one level, so the C code never chooses an instruction set
at run time. `python -m pegboard_kernel_cpu.build` compiles for this machine ahead of time.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from pegboard.env import cache_dir
from pegboard.errors import ConfigError
from pegboard.log import get_logger

log = get_logger(__name__)

SOURCES = Path(__file__).parent / "csrc"

SWITCHES = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi")

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c")
_VNNI = (*_AVX512, "-mavx512vnni")
LEVELS: dict[str, tuple[str, ...]] = {
    "amx": (*_VNNI, "-mamx-tile", "-mamx-int8"),
    "avx512_vnni": _VNNI,
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "plain": (),
}
"""Level → compiler switches, best first."""

_AVX512_FLAGS = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"}
FAULTS = frozenset({signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT})
WRONG = 3
"""A trial proves that a library is unusable in two ways: one of the signals FAULTS kills it, or it exits with status WRONG and
prints the reason on stdout."""

_FLAGS = {
    "amx": {*_AVX512_FLAGS, "avx512_vnni", "amx_tile", "amx_int8"},
    "avx512_vnni": {*_AVX512_FLAGS, "avx512_vnni"},
    "avx512": _AVX512_FLAGS,
    "avx2": {"avx2", "fma", "f16c"},
}
"""Level → flags that /proc/cpuinfo must list."""


def levels_of(cpu_flags: Collection[str]) -> list[str]:
    """Return the levels that a CPU with these flags can run, best first."""
    return [level for level in LEVELS if _FLAGS.get(level, set()) <= set(cpu_flags)]


def usable_levels(cpu_flags: Collection[str]) -> list[str]:
    """Return the supported levels, without those whose library failed its trial on this machine."""
    return [level for level in levels_of(cpu_flags) if failure(level) is None]


def cpu_flags() -> frozenset[str]:
    """Return the CPU flags that the operating system lists. On a system that lists none, the set is empty."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def compiler() -> str | None:
    """Return the path of a C compiler, or None."""
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


@functools.lru_cache
def _digest(switches: tuple[str, ...]) -> str:
    """Return a digest of the sources and switches. A library is valid only for the digest in its name."""
    digest = hashlib.sha256(repr((SWITCHES, switches)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def library_path(level: str) -> Path:
    """Return the path of a level's library, whether or not it has been compiled yet."""
    return cache_dir() / "kernels" / f"pegboard_cpu-{level}-{_digest(LEVELS[level])}.so"


def failure(level: str) -> str | None:
    """Return why the library of a level does not work on this machine, or None if it works or was never tried."""
    try:
        return library_path(level).with_suffix(".failed").read_text()
    except FileNotFoundError:
        return None


def compiled(level: str) -> Path:
    """Return the path of a level's library. If necessary, compile and try it first. Raises ConfigError with the compiler's
    output, or with the reason why the trial failed."""
    path = library_path(level)
    if path.exists():
        return path
    if (reason := failure(level)) is not None:
        raise ConfigError(f"the CPU kernels for {level} do not work on this machine: {reason}")
    command = compiler()
    if command is None:
        raise ConfigError("no C compiler was found (cc, gcc or clang): install one, or choose reference kernels")
    log.info("compiling CPU kernels for %s (only once)", level)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
    arguments = [command, *SWITCHES, *LEVELS[level], "-shared", "-fPIC", "-fvisibility=hidden", *sources]
    try:
        done = subprocess.run([*arguments, "-o", unfinished, "-lpthread", "-lm"], capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise ConfigError(f"{command} could not compile the CPU kernels for {level}:\n{done.stderr.strip()[-2000:]}")
        if (reason := _trial(unfinished)) is not None:
            path.with_suffix(".failed").write_text(reason)
            raise ConfigError(f"the CPU kernels for {level} do not work on this machine: {reason}")
        os.replace(unfinished, path)  # another process may have been faster, but it compiled the same file
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return path


def _trial(path: str) -> str | None:
    """Use a library in a separate process and return what went wrong, or None. The process is needed because an instruction that
    the CPU lists, but that the system or the host of a virtual machine forbids, kills the process. If a trial fails for any other
    reason, nothing is known about the library, and the result is None."""
    command = [sys.executable, "-m", "pegboard_kernel_cpu.trial", path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if -done.returncode in FAULTS:
        return f"a trial was killed by {signal.Signals(-done.returncode).name}"
    if done.returncode == WRONG:
        return done.stdout.strip()
    if done.returncode:
        log.warning("a compiled library could not be tried: %s", done.stderr.strip()[-500:] or f"exit status {done.returncode}")
    return None


def best_compiled(refused: Collection[str] = ()) -> tuple[str, Path]:
    """Return the best level that works on this machine and the path of its library, which is compiled first if necessary.
    refused: levels to skip. Raises ConfigError if no level works."""
    levels = [level for level in usable_levels(cpu_flags()) if level not in refused] or ["plain"]
    for level in levels[:-1]:
        try:
            return level, compiled(level)
        except ConfigError as error:
            log.warning("%s; trying the next level", error)
    return levels[-1], compiled(levels[-1])


if __name__ == "__main__":
    try:
        print(best_compiled()[1])
    except ConfigError as error:
        sys.exit(str(error))
