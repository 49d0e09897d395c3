"""Compiling: levels, the cache, and words for what is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pegboard_kernel_cpu import build
from pegboard_kernel_cpu.probe import probe

from pegboard.errors import ConfigError
from pegboard.interfaces.spec import Absent, Ok, ProbeFacts

AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c", "avx2"}


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (set(), "plain"),
        ({"avx2"}, "plain"),
        ({"avx2", "fma", "f16c"}, "avx2"),
        (AVX512 - {"avx512bw"}, "avx2"),
        (AVX512, "avx512"),
        (AVX512 | {"avx512_vnni"}, "avx512_vnni"),
    ],
)
def test_the_level_of_a_cpu(flags: set[str], level: str) -> None:
    assert build.level_of(flags) == level


@pytest.mark.parametrize("level", list(build.LEVELS))
def test_every_level_compiles(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path))
    path = build.compiled(level)
    assert path.parent.parent == tmp_path and [*path.parent.iterdir()] == [path]
    before = path.stat().st_mtime_ns
    assert build.compiled(level) == path and path.stat().st_mtime_ns == before


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho 'no such switch' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    with pytest.raises(ConfigError, match="(?s)could not compile the CPU kernels for plain.*no such switch"):
        build.compiled("plain")
    assert not list((tmp_path / "cache" / "kernels").iterdir())


def test_without_a_compiler_or_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ProbeFacts(machine="x86_64", system="Linux")
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path))
    assert isinstance(probe(facts), Ok)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    verdict = probe(facts)
    assert isinstance(verdict, Absent) and "no C compiler" in verdict.reason
    with pytest.raises(ConfigError, match="no C compiler"):
        build.compiled("plain")
