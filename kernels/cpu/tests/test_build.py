"""Compiling the kernels: levels, the cache, and messages about what is missing."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pegboard_kernel_cpu import build, library
from pegboard_kernel_cpu.probe import probe

from pegboard.env import cpu_flags
from pegboard.errors import ConfigError
from pegboard.interfaces.spec import Absent, Ok, ProbeFacts

ARM = {"fp", "asimd", "atomics", "asimdrdm", "asimddp"}
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c", "avx2"}


@pytest.fixture
def quick_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, for libraries that are compiled without optimization, in a fifth of the
    time."""
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SWITCHES", ("-O0", *build.SWITCHES[1:]))
    build._digest.cache_clear()
    yield tmp_path / "cache"
    build._digest.cache_clear()


@pytest.fixture
def empty_library(quick_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and sources that compile in no time, because they contain no kernels."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "nothing.c").write_text("int nothing;\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    return quick_cache


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (set(), "plain"),
        ({"avx2"}, "plain"),
        ({"avx2", "fma", "f16c"}, "avx2"),
        ({"avx2", "fma", "f16c", "avx_vnni"}, "avx_vnni"),
        (AVX512 - {"avx512bw"}, "avx2"),
        (AVX512, "avx512"),
        (AVX512 | {"avx512_vnni"}, "avx512_vnni"),
        (AVX512 | {"avx512_vnni", "amx_tile"}, "avx512_vnni"),
        (AVX512 | {"avx512_vnni", "amx_tile", "amx_bf16"}, "avx512_vnni"),
        (AVX512 | {"avx512_vnni", "avx512_bf16"}, "avx512_bf16"),
        (AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"}, "amx"),
        ({"fp", "asimd"}, "neon"),
        ({"fp", "asimd", "asimddp"}, "neon"),
        (ARM, "neon_dotprod"),
        (ARM | {"i8mm"}, "neon_i8mm"),
    ],
)
def test_the_level_of_a_cpu(flags: set[str], level: str) -> None:
    assert build.levels_of(flags)[0] == level


X86_LEVELS = [level for level in build.LEVELS if not level.startswith("neon")]


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the compiler knows x86 levels only there"
)
@pytest.mark.parametrize(
    "level", [level for level in X86_LEVELS if level not in build.levels_of(cpu_flags())][:1]
)
def test_a_level_that_this_cpu_lacks_compiles_and_fails_its_trial(
    level: str, quick_cache: Path
) -> None:
    """The other levels are compiled for the tests of the kernels."""
    with pytest.raises(ConfigError, match=f"{level} do not work on this machine: .*(SIGILL|tiles)"):
        build.compiled(level)
    assert build.failure(level) and [*build.library_path(level).parent.iterdir()] == [
        build.library_path(level).with_suffix(".failed")
    ]


def test_a_level_is_compiled_once(empty_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_trial", lambda path: None)
    path = build.compiled("plain")
    assert path.parent.parent == empty_library and [*path.parent.iterdir()] == [path]
    before = path.stat().st_mtime_ns
    assert build.compiled("plain") == path and path.stat().st_mtime_ns == before


def test_processes_that_start_together_compile_once(
    empty_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of several ranks do. Each opens the folder itself, so threads are enough here."""
    made = []
    make = build._make
    monkeypatch.setattr(build, "_trial", lambda path: None)
    monkeypatch.setattr(build, "_make", lambda *args: (made.append(args), make(*args)))
    with ThreadPoolExecutor(3) as threads:
        paths = {*threads.map(build.compiled, ["plain"] * 3)}
    assert len(paths) == len(made) == 1


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho 'no such switch' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    with pytest.raises(
        ConfigError, match="(?s)could not compile the CPU kernels for plain.*no such switch"
    ):
        build.compiled("plain")
    assert not list((tmp_path / "cache" / "kernels").iterdir())


def test_a_level_that_does_not_work_is_passed_over(
    empty_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = cpu_flags()
    best, *others = build.levels_of(flags)
    if not others:
        pytest.skip("this CPU runs only the plain level")
    monkeypatch.setattr(build, "_trial", lambda path: "a trial was killed by SIGILL")
    with pytest.raises(
        ConfigError, match=f"{best} do not work on this machine: a trial was killed by SIGILL"
    ):
        build.compiled(best)
    monkeypatch.setattr(build, "_trial", lambda path: None)
    level, path = build.best_compiled()
    assert level == others[0] and path == build.library_path(level)
    verdict = probe(ProbeFacts(machine="x86_64", cpu_flags=flags))
    assert isinstance(verdict, Ok)
    assert verdict.facts == {
        "level": level,
        "library": "compiled",
        "passed over": f"{best}: a trial was killed by SIGILL",
    }


@pytest.mark.parametrize(
    "end", ["import os; os.kill(os.getpid(), 9)", "raise SystemExit('no such module')"]
)
def test_a_trial_that_ends_for_another_reason_is_no_verdict(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **kwargs: run([command[0], "-c", end], **kwargs)
    )
    assert build._trial("any.so") is None


@pytest.mark.slow
def test_a_level_that_this_process_may_not_use_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best, *others = build.levels_of(cpu_flags())
    if not others:
        pytest.skip("this CPU runs only the plain level")

    # as the tests of the kernels compile it
    monkeypatch.setitem(build.LEVELS, others[0], (*build.LEVELS[others[0]], "-O1"))

    class Refusing(library.Library):
        def __init__(self, level: str, path: Path, num_threads: int) -> None:
            if level == best:
                raise ConfigError("no tiles")
            super().__init__(level, path, num_threads)

    monkeypatch.setattr(library, "Library", Refusing)
    found = library._best(1)
    found.stop()
    assert found.level == others[0]


@pytest.mark.slow
def test_a_library_that_multiplies_wrong_fails_its_trial(
    tmp_path: Path, quick_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, sources)
    products = sources / "linear_blocks.c"
    right = "sums[v] += scales->minimum[v] * splat(x_sum)"
    assert right in products.read_text()
    products.write_text(
        products.read_text().replace(right, "sums[v] -= scales->minimum[v] * splat(x_sum)")
    )
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setitem(build.LEVELS, "plain", ("-DWRONG",))
    with pytest.raises(ConfigError, match="plain do not work on this machine: a 4-bit product is"):
        build.compiled("plain")


def test_without_a_compiler_or_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ProbeFacts(machine="x86_64")
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path))
    assert isinstance(probe(facts), Ok)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    verdict = probe(facts)
    assert isinstance(verdict, Absent) and "no C compiler" in verdict.reason
    with pytest.raises(ConfigError, match="no C compiler"):
        build.compiled("plain")
