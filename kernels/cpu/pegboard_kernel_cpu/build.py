"""Compiles the C sources for one level of CPU features, once, into the cache.

A level is a set of compiler switches. The whole library is compiled for one level, so the C code
never chooses an instruction set at run time. `python -m pegboard_kernel_cpu.build` compiles for
this machine ahead of time.

A library is sealed with a checksum, which is compared before the library is loaded. A damaged one
is compiled again. If the cache cannot be written or is not trusted (see cache_files), a folder of
this user in memory or on a temporary disk takes its place. Several processes may compile at the
same time: each writes a file of its own and then renames it.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from pegboard.env import cache_dir, cpu_flags, usable_cpus
from pegboard.errors import ConfigError
from pegboard.log import get_logger
from pegboard_kernel_cpu.cache_files import (
    SEAL,
    Damaged,
    alone_in,
    check_room,
    explain,
    make_folder,
    read_sealed,
    sweep,
    warn_once,
    write_sealed,
)

log = get_logger(__name__)

SOURCES = Path(__file__).parent / "csrc"

TRIAL = ("trial.py", "structures.py")
"""The modules that decide whether a library works."""

SWITCHES = (
    "-O3",
    "-std=gnu11",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wno-psabi",
    # Newer compilers multiply and add separately in a few loops, so that a token's result would
    # depend on the number of tokens.
    "--param=avoid-fma-max-bits=0",
)

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_VNNI = (*_AVX512, "-mavx512vnni")
LEVELS: dict[str, tuple[str, ...]] = {
    "amx": (*_VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": (*_VNNI, "-mavx512bf16"),
    "avx512_vnni": _VNNI,
    "avx512": _AVX512,
    "avx_vnni": (*_AVX2, "-mavxvnni"),
    "avx2": _AVX2,
    "neon_i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
    "neon_dotprod": ("-march=armv8.2-a+dotprod",),
    "neon": (),
    "plain": (),
}
"""Level → compiler switches, best first. Every 64-bit Arm CPU has what neon needs."""

_AVX512_FLAGS = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"}
_AVX2_FLAGS = {"avx2", "fma", "f16c"}
_DOTPROD_FLAGS = {"asimd", "asimddp", "asimdrdm", "atomics"}
FAULTS = frozenset({signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT})
WRONG = 3
"""A trial proves that a library is unusable in two ways: one of the signals FAULTS kills it, or it
exits with status WRONG and prints the reason on stdout."""

NOT_LOADED = 4
"""The exit status of a trial that could not load the library, for example because its folder does
not allow programs (noexec). The reason is on stdout."""

COMPILE_S = 600
TRIAL_S = 120
"""How many seconds the compiler and a trial may take."""

MAX_COMPILERS = 8
"""The largest number of compilers at the same time. Each takes up to 0.4 GB of memory."""

ROOM = 8 << 20
"""The free bytes that a folder must have to compile in it."""

_FLAGS = {
    "amx": {*_AVX512_FLAGS, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512_bf16": {*_AVX512_FLAGS, "avx512_vnni", "avx512_bf16"},
    "avx512_vnni": {*_AVX512_FLAGS, "avx512_vnni"},
    "avx512": _AVX512_FLAGS,
    "avx_vnni": {*_AVX2_FLAGS, "avx_vnni"},
    "avx2": _AVX2_FLAGS,
    "neon_i8mm": {*_DOTPROD_FLAGS, "i8mm"},
    "neon_dotprod": _DOTPROD_FLAGS,
    "neon": {"asimd"},
}
"""Level → flags that /proc/cpuinfo must list."""


def levels_of(flags: Collection[str]) -> list[str]:
    """Return the levels that a CPU with these flags can run, best first."""
    return [level for level in LEVELS if _FLAGS.get(level, set()) <= set(flags)]


def usable_levels(flags: Collection[str]) -> list[str]:
    """Return the supported levels, without those whose library failed its trial on this machine."""
    return [level for level in levels_of(flags) if failure(level) is None]


def compiler() -> str | None:
    """Return the path of a C compiler, or None."""
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


@functools.lru_cache
def _digest(switches: tuple[str, ...]) -> str:
    """Return a digest of everything that determines a library and the verdict about it: sources,
    trial, switches, machine type, C library, form of the file. A library is valid only for the
    digest in its name."""
    digest = hashlib.sha256(
        repr(
            (SWITCHES, switches, platform.machine(), os.confstr("CS_GNU_LIBC_VERSION"), SEAL)
        ).encode()
    )
    for path in (*sorted(SOURCES.iterdir()), *(Path(__file__).with_name(name) for name in TRIAL)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def folders() -> list[Path]:
    """Return the folders that may hold compiled libraries, best first: the cache, and two that only
    this user uses."""
    return [
        cache_dir() / "kernels",
        *(Path(place) / f"pegboard-kernels-{os.geteuid()}" for place in ("/tmp", "/dev/shm")),
    ]


def library_path(level: str) -> Path:
    """Return the path of a level's library in the cache, whether or not it has been compiled
    yet."""
    return folders()[0] / f"pegboard_cpu-{level}-{_digest(LEVELS[level])}.so"


def _sealed(name: str, avoided: Collection[Path] = ()) -> Iterator[tuple[Path, bytes]]:
    """Yield path and content of the files of this name that are whole and trusted. The log tells
    about all others."""
    for folder in folders():
        path = folder / name
        if folder in avoided:
            continue
        try:
            yield path, read_sealed(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except Damaged as error:
            warn_once(f"{error}; it is made again")
        except OSError as error:
            warn_once(f"{path} is not used: {explain(error)}")


def find(level: str, avoided: Collection[Path] = ()) -> Path | None:
    """Return the path of a level's compiled library, or None if there is none that is whole and
    trusted."""
    return next((path for path, _ in _sealed(library_path(level).name, avoided)), None)


def failure(level: str) -> str | None:
    """Return why the library of a level does not work on this machine, or None if it works or was
    never tried."""
    name = library_path(level).with_suffix(".failed").name
    return next((content.decode(errors="replace") for _, content in _sealed(name)), None)


def obstacle() -> str | None:
    """Return why no folder can take a compiled library, or None if one can."""
    reasons = []
    for folder in folders():
        try:
            check_room(folder, ROOM)
            return None
        except OSError as error:
            reasons.append(f"{folder}: {explain(error)}")
    return "; ".join(reasons)


def compiled(level: str, avoided: Collection[Path] = ()) -> Path:
    """Return the path of a level's library. If necessary, compile and try it first. avoided:
    folders not to use. Raises ConfigError with the compiler's output, or with the reason why the
    trial failed or why no folder can take the library."""
    if (library := find(level, avoided)) is not None:
        return library
    if (reason := failure(level)) is not None:
        raise ConfigError(f"the CPU kernels for {level} do not work on this machine: {reason}")
    command = compiler()
    if command is None:
        raise ConfigError(
            "no C compiler was found (cc, gcc or clang): install one, or choose reference kernels"
        )
    reasons = []
    for folder in folders():
        if folder in avoided:
            continue
        try:
            check_room(folder, ROOM)
            make_folder(folder)
            with alone_in(folder):
                # another process, such as that of another rank, may have compiled it meanwhile
                path = find(level, avoided) or _compile(command, level, folder)
        except OSError as error:
            reasons.append(f"{folder}: {explain(error)}")
            continue
        if reasons:
            warn_once(
                f"the compiled CPU kernels are kept in {folder}, because the cache cannot take "
                f"them ({'; '.join(reasons)})"
            )
        return path
    message = "; ".join(reasons) or "libraries cannot be loaded from any"
    raise ConfigError(
        f"no folder can take the compiled CPU kernels ({message}): free some space, set "
        "PEGBOARD_CACHE to another folder, or choose reference kernels"
    )


def _compile(command: str, level: str, folder: Path) -> Path:
    """Compile a level's library into a folder. Raises OSError if the folder is the problem, and
    ConfigError if the library is."""
    log.info("compiling CPU kernels for %s (only once)", level)
    path = folder / library_path(level).name
    sweep(folder, ".*")
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=folder) as temporary:
        unfinished = Path(temporary) / "library.so"
        _make(command, level, unfinished)
        if (reason := _trial(str(unfinished))) is not None:
            write_sealed(path.with_suffix(".failed"), reason.encode())
            raise ConfigError(f"the CPU kernels for {level} do not work on this machine: {reason}")
        write_sealed(path, unfinished.read_bytes())
    return path


def _make(command: str, level: str, library: Path) -> None:
    """Compile the sources side by side, the largest first, and link them. Files are written next to
    `library` only."""
    from tqdm import tqdm  # imported here, because most processes compile nothing

    compiling = [command, *SWITCHES, *LEVELS[level], "-fPIC", "-fvisibility=hidden", "-c"]
    sources = sorted(SOURCES.glob("*.c"), key=lambda source: -source.stat().st_size)
    objects = [library.with_name(f"{source.stem}.o") for source in sources]
    steps = [
        [*compiling, str(source), "-o", str(to)]
        for source, to in zip(sources, objects, strict=True)
    ]
    num_cpus = len(usable_cpus())
    with ThreadPoolExecutor(min(num_cpus, MAX_COMPILERS)) as pool:
        waiting = {pool.submit(_compiler_step, step, level, library.parent) for step in steps}
        is_hidden = not sys.stderr.isatty()
        with tqdm(
            desc="Compiling CPU kernels", total=len(steps), leave=False, disable=is_hidden
        ) as bar:
            while waiting:
                # not for longer: a call that does not return for seconds is reported as hanging
                done, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
                bar.update(len(done))
                for step in done:
                    step.result()
    _compiler_step(
        [command, "-shared", *map(str, objects), "-o", str(library), "-lpthread", "-lm"],
        level,
        library.parent,
    )


def _compiler_step(step: list[str], level: str, folder: Path) -> None:
    """Run a step of the compiler. Raises OSError if the disk is the problem, and otherwise
    ConfigError, if it fails."""
    done = _run(step, COMPILE_S, {"TMPDIR": str(folder), "LC_ALL": "C"})
    if not done.returncode:
        return
    message = done.stderr.strip()
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
        if os.strerror(number) in message:
            raise OSError(number, os.strerror(number), str(folder.parent))
    cure = "repair the compiler, or choose reference kernels"
    raise ConfigError(
        f"{step[0]} could not compile the CPU kernels for {level} ({cure}):\n{message[-2000:]}"
    )


def _run(
    command: list[str], limit_s: float, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program and return its output. Raises ConfigError if it takes longer than `limit_s`
    seconds."""
    try:
        environment = {**os.environ, **environment}
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{Path(command[0]).name} did not end within {limit_s} s while the CPU kernels were "
            "made"
        ) from error


def _trial(path: str) -> str | None:
    """Use a library in a separate process and return what went wrong, or None. The process is
    needed because an instruction that the CPU lists, but that the system or the host of a virtual
    machine forbids, kills the process. If a trial fails for any other reason, nothing is known
    about the library, and the result is None. Raises OSError if the library cannot be loaded from
    its folder."""
    command = [sys.executable, "-m", "pegboard_kernel_cpu.trial", path]
    done = _run(command, TRIAL_S, {"PYTHONPATH": os.pathsep.join(sys.path)})
    if -done.returncode in FAULTS:
        return f"a trial was killed by {signal.Signals(-done.returncode).name}"
    if done.returncode == WRONG:
        return done.stdout.strip()
    if done.returncode == NOT_LOADED:
        raise OSError(
            errno.ENOEXEC, f"libraries cannot be loaded from there ({done.stdout.strip()})", path
        )
    if done.returncode:
        log.warning(
            "a compiled library could not be tried: %s",
            done.stderr.strip()[-500:] or f"exit status {done.returncode}",
        )
    return None


def best_compiled(
    refused: Collection[str] = (), avoided: Collection[Path] = ()
) -> tuple[str, Path]:
    """Return the best level that works on this machine and the path of its library, which is
    compiled first if necessary. refused: levels to skip. avoided: folders not to use. Raises
    ConfigError if no level works."""
    levels = [level for level in usable_levels(cpu_flags()) if level not in refused] or ["plain"]
    for level in levels[:-1]:
        try:
            return level, compiled(level, avoided)
        except ConfigError as error:
            log.warning("%s; trying the next level", error)
    return levels[-1], compiled(levels[-1], avoided)


if __name__ == "__main__":
    try:
        print(best_compiled()[1])
    except ConfigError as error:
        sys.exit(str(error))
