"""Cached files are used only if they are whole and nobody else can have changed them. The kernels
always come up."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
from ctypes import CDLL
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pegboard_kernel_cpu import build, cache_files, library, repack
from pegboard_kernel_cpu.block_weight import NativeBlockWeight
from pegboard_kernel_cpu.cache_files import (
    Damaged,
    make_folder,
    open_trusted,
    read_sealed,
    write_file,
    write_sealed,
)
from pegboard_kernel_cpu.probe import probe
from pegboard_kernel_cpu.repack import PAGE, _sum, store_packed

from pegboard.errors import ConfigError
from pegboard.interfaces.quantization import RepackCache, RepackEntry
from pegboard.interfaces.spec import Absent, Ok, ProbeFacts
from pegboard.ops.blocks import Blocks

FACTS = ProbeFacts(machine="x86_64")  # no CPU flags: the level is "plain"


@pytest.fixture(autouse=True)
def forget_warnings() -> None:
    cache_files.warn_once.cache_clear()


@pytest.fixture(scope="module")
def made_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small shared library, which takes the place of the kernels."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "answer.c").write_text("int answer(void) { return 42; }\n")
    made = folder / "answer.so"
    subprocess.run(
        [build.compiler() or "cc", "-shared", "-fPIC", str(folder / "answer.c"), "-o", str(made)],
        check=True,
    )
    return made


@pytest.fixture
def kernels(tmp_path: Path, made_library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three empty folders for compiled libraries, the cache among them, and a compiler that copies
    one library."""
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path / "cache"))
    places = [tmp_path / "cache" / "kernels", tmp_path / "first", tmp_path / "second"]
    monkeypatch.setattr(build, "folders", lambda: places)
    monkeypatch.setattr(build, "_trial", lambda path: None)
    fake = tmp_path / "cc"
    fake.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncat {made_library} > "$2"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    return places[0]


def works(path: Path) -> bool:
    return CDLL(str(path)).answer() == 42


def damages(data: bytes, seed: int) -> bytes:
    """Return the bytes damaged at random: truncated, emptied, with a flipped bit, exchanged parts,
    a block of zeros, or more bytes at the end."""
    rng = random.Random(seed)
    where = rng.randrange(len(data))
    size = rng.randrange(1, 5000)
    half = len(data) // 2
    flipped = bytearray(data)
    flipped[where] ^= 1 << rng.randrange(8)
    return [
        lambda: data[:where],
        lambda: b"",
        lambda: bytes(flipped),
        lambda: data[half:] + data[:half],
        lambda: data[:where] + bytes(len(data[where : where + size])) + data[where + size :],
        lambda: data + rng.randbytes(size),
        lambda: rng.randbytes(len(data)),
        lambda: data[:where] + rng.randbytes(min(size, len(data) - where)) + data[where + size :],
    ][seed % 8]()


# --- files ----------------------------------------------------------------------------------------


def test_files_are_readable_for_everybody_and_writable_for_nobody_else(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        make_folder(tmp_path / "a" / "b")
        write_file(tmp_path / "a" / "b" / "file", [b"x"])
    finally:
        os.umask(before)
    modes = [
        path.stat().st_mode & 0o777
        for path in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "file")
    ]
    assert modes == [0o755, 0o755, 0o644]


@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_change_is_not_opened(tmp_path: Path, what: str, mode: int) -> None:
    folder = tmp_path / "folder"
    make_folder(folder)
    write_sealed(folder / "file", b"content")
    assert read_sealed(folder / "file") == b"content"
    path = folder / "file" if what == "file" else folder
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(PermissionError, match=f"other users may change {path} .*chmod go-w {path}"):
        open_trusted(folder / "file")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_belongs_to_others_is_not_opened(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    make_folder(folder)
    write_sealed(folder / "file", b"content")
    if os.geteuid() == 0:
        os.chown(folder / "file" if what == "file" else folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        open_trusted(folder / "file")


def test_a_pipe_or_a_folder_is_no_file(tmp_path: Path) -> None:
    """Opening a pipe would wait for ever."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(0o755)
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match="not a plain file"):
            open_trusted(tmp_path / name)


@given(content=st.binary(max_size=200), seed=st.integers(0, 999))
def test_a_sealed_file_is_whole_or_damaged(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, seed: int
) -> None:
    path = tmp_path_factory.mktemp("sealed") / "file"
    write_sealed(path, content)
    assert read_sealed(path) == content
    whole = path.read_bytes()
    changed = damages(whole, seed)
    path.write_bytes(changed)
    if changed != whole:
        with pytest.raises(Damaged, match="checksum"):
            read_sealed(path)


@given(
    words=st.integers(2, 3 * PAGE // 4 + 3).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(0, n - 1))
    ),
    bits=st.tuples(st.integers(0, 31), st.integers(0, 31)),
    seed=st.integers(0, 99),
)
def test_the_sum_of_packed_weights_sees_flips_and_exchanges(
    words: tuple[int, int, int], bits: tuple[int, int], seed: int
) -> None:
    """One flipped bit, two flipped bits, and two exchanged words, which a sum without factors does
    not see."""
    count, first, second = words
    # words that differ in few bits
    data = np.random.default_rng(seed).integers(0, 4, count, np.uint32) << np.uint32(30)
    before = _sum(memoryview(data.tobytes()))
    one = data.copy()
    two = data.copy()
    exchanged = data.copy()
    one[first] ^= np.uint32(1 << bits[0])
    two[first] ^= np.uint32(1 << bits[0])
    two[second] ^= np.uint32(1 << bits[1])
    exchanged[[first, second]] = exchanged[[second, first]]
    assert _sum(memoryview(one.tobytes())) != before
    for changed in (two, exchanged):
        assert (_sum(memoryview(changed.tobytes())) == before) == np.array_equal(changed, data)


# --- compiled libraries ---------------------------------------------------------------------------


def test_a_library_is_compiled_once_and_readable_for_others(kernels: Path) -> None:
    path = build.compiled("plain")
    assert path.parent == kernels and works(path) and path.stat().st_mode & 0o777 == 0o644
    before = path.stat().st_mtime_ns
    assert build.compiled("plain") == path and path.stat().st_mtime_ns == before
    assert [*kernels.iterdir()] == [path], "the compiler's files are gone"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_library_is_compiled_again(
    kernels: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = build.compiled("plain")
    whole = path.read_bytes()
    path.write_bytes(damages(whole, seed))
    changed = path.read_bytes() != whole
    assert (build.find("plain") is None) == changed
    verdict = probe(FACTS)
    assert isinstance(verdict, Ok) and verdict.facts["library"] != "compiled" or not changed
    again = build.compiled("plain")
    assert again == path and read_sealed(path) and works(again)
    assert ("damaged" in caplog.text) == changed


def test_a_damaged_library_without_a_compiler(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build.compiled("plain")
    path.write_bytes(path.read_bytes()[:1000])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    verdict = probe(FACTS)
    assert isinstance(verdict, Absent) and "no C compiler" in verdict.reason


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a trial was killed by SIGILL"])
def test_a_damaged_note_of_a_failure_counts_for_nothing(kernels: Path, content: bytes) -> None:
    make_folder(kernels)
    note = build.library_path("plain").with_suffix(".failed")
    write_file(note, [content])
    assert build.failure("plain") is None and works(build.compiled("plain"))
    write_sealed(note, content or b"it failed")
    assert build.failure("plain")


FULL = errno.ENOSPC
READ_ONLY = errno.EROFS
QUOTA = errno.EDQUOT


def break_cache(how: str | int, kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the cache unusable in one way: its folder is wrong, or a file there cannot be
    written."""

    def refuse(path: Path, content: bytes) -> None:
        if path.parent == kernels:
            raise OSError(how, os.strerror(int(how)), str(path))
        write_sealed(path, content)

    if how == "writable":
        make_folder(kernels)
        kernels.chmod(0o777)
    elif how == "file":
        kernels.parent.mkdir()
        kernels.write_text("a file instead of the folder")
    else:
        monkeypatch.setattr(build, "write_sealed", refuse)


WAYS = [
    ("writable", "other users may change"),
    ("file", "not a folder"),
    (FULL, "the disk is full"),
    (READ_ONLY, "read-only"),
    (QUOTA, "quota is used up"),
]


@pytest.mark.parametrize(("how", "told"), WAYS)
def test_without_the_cache_another_folder_takes_the_library(
    kernels: Path,
    how: str | int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    break_cache(how, kernels, monkeypatch)
    path = build.compiled("plain")
    assert path.parent == build.folders()[1] and works(path)
    assert told in caplog.text and str(path.parent) in caplog.text
    before = path.stat().st_mtime_ns
    assert build.compiled("plain") == path and path.stat().st_mtime_ns == before, (
        "it is found there again"
    )


def test_if_no_folder_can_take_the_library_the_probe_says_why(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then core's own operators serve."""
    monkeypatch.setattr(build, "ROOM", 1 << 62)
    verdict = probe(FACTS)
    assert (
        isinstance(verdict, Absent)
        and verdict.reason.count("the disk is full") == 3
        and "PEGBOARD_CACHE" in verdict.reason
    )
    with pytest.raises(
        ConfigError, match="no folder can take the compiled CPU kernels .*the disk is full"
    ):
        build.compiled("plain")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "fatal error: error writing to /x/y.s: No space left on device",
            "no folder .*: the disk is full",
        ),
        (
            "as: /x/y.o: File too large",
            "no folder .*: the file would be larger than this process may write",
        ),
        ("cc: fatal error: cannot execute cc1", "repair the compiler, or choose reference kernels"),
    ],
)
def test_what_the_compiler_says_is_told(
    kernels: Path, tmp_path: Path, said: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "failing"
    fake.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    with pytest.raises(ConfigError, match=told):
        build.compiled("plain")


def test_a_folder_that_allows_no_programs_is_passed_over(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake(library.Library):
        def __init__(self, level: str, path: Path, num_threads: int) -> None:
            if path.parent == kernels:
                raise library.NotLoadable("failed to map segment from shared object")
            self.path = path

    monkeypatch.setattr(library, "Library", Fake)
    monkeypatch.setattr(build, "cpu_flags", frozenset)
    assert library._best(1).path.parent == build.folders()[1]  # type: ignore[attr-defined]

    class Nowhere(Fake):
        def __init__(self, level: str, path: Path, num_threads: int) -> None:
            raise library.NotLoadable("failed to map segment from shared object")

    monkeypatch.setattr(library, "Library", Nowhere)
    with pytest.raises(ConfigError, match="cannot be loaded from any"):
        library._best(1)


def test_the_last_level_that_fails_ends_the_search(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(library.Library):
        def __init__(self, level: str, path: Path, num_threads: int) -> None:
            raise ConfigError("no permission")

    monkeypatch.setattr(library, "Library", Failing)
    with pytest.raises(ConfigError, match="no permission"):
        library._best(1)


def test_a_trial_of_what_cannot_be_loaded_blames_the_folder(tmp_path: Path) -> None:
    (tmp_path / "none.so").write_bytes(b"no library")
    with pytest.raises(OSError, match="cannot be loaded from there"):
        build._trial(str(tmp_path / "none.so"))


def test_a_compiler_without_end_is_stopped(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "slow"
    fake.write_text(f"#!{sys.executable}\nimport signal; signal.pause()\n")
    fake.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    monkeypatch.setattr(build, "COMPILE_S", 0.2)
    with pytest.raises(ConfigError, match="slow did not end within 0.2 s"):
        build.compiled("plain")


def test_several_processes_compile_at_once(kernels: Path) -> None:
    """Threads take their place: they share no state but the folder."""
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(build.compiled("plain"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({*found}) == 1 and works(found[0])
    assert [*kernels.iterdir()] == [found[0]]


def test_rests_of_killed_processes_are_deleted_after_a_while(kernels: Path) -> None:
    make_folder(kernels)
    (kernels / ".compile-old").mkdir()
    (kernels / ".compile-old" / "library.so").write_bytes(b"x")
    (kernels / ".old.new").write_bytes(b"x")
    (kernels / ".fresh.new").write_bytes(b"x")
    for name in (".compile-old", ".old.new"):
        os.utime(kernels / name, (0, 0))
    path = build.compiled("plain")
    assert sorted(kernels.iterdir()) == sorted([path, kernels / ".fresh.new"])


# --- packed weights -------------------------------------------------------------------------------


def entry_in(root: Path) -> RepackEntry:  # as when the engine starts
    return RepackCache(root, "sha256:1", 1 << 30).entry("layers.0", {})


def loaded(entry: RepackEntry, blocks: Blocks, rows: int, columns: int) -> NativeBlockWeight:
    """Load a weight as an engine does: from its file, or else from the checkpoint."""
    weight = NativeBlockWeight((rows, columns), torch.float32, "cpu", cache=entry)
    if not weight.restore():
        weight.write(0, blocks)
        weight.finish()
    return weight


def some_blocks(rows: int, columns: int) -> Blocks:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    scale = torch.rand(rows, columns // 32, generator=generator).half()
    return Blocks(codes=codes, scale=scale, minimum=None, bits=4, block_size=32, zero=8)


@pytest.mark.parametrize("seed", range(160))
def test_a_damaged_packed_weight_is_packed_again(tmp_path: Path, seed: int) -> None:
    blocks = some_blocks(64, 256)
    expected = loaded(entry_in(tmp_path), blocks, 64, 256).dense()
    (path,) = [file for file in tmp_path.rglob("*") if file.is_file()]
    whole = path.read_bytes()
    path.write_bytes(damages(whole, seed))
    weight = loaded(entry_in(tmp_path), blocks, 64, 256)
    assert torch.equal(weight.dense(), expected)
    again = NativeBlockWeight((64, 256), torch.float32, "cpu", cache=entry_in(tmp_path))
    assert again.restore() and torch.equal(again.dense(), expected), "the file was written again"


def test_exchanged_files_are_not_taken_for_each_other(tmp_path: Path) -> None:
    cache = RepackCache(tmp_path, "sha256:1", 1 << 30)
    parts = [memoryview(bytes([number]) * 5000) for number in range(2)]
    for number, part in enumerate(parts):
        store_packed(cache.entry(f"layers.{number}", {}), "tiles", part, {})
    first, second = (file for file in tmp_path.rglob("*") if file.is_file())
    other = tmp_path / "other"
    first.rename(other), second.rename(first), other.rename(second)
    again = RepackCache(tmp_path, "sha256:1", 1 << 30)
    assert [
        repack.open_packed(again.entry(f"layers.{number}", {}), "tiles") for number in range(2)
    ] == [None, None]


RIGHT = [[0, 64, 4, 32, 0, 0, 8, -1, 0]]


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"runs": None},
        {"runs": []},
        {"runs": "runs"},
        {"runs": [None]},
        {"runs": [RIGHT[0][:8]]},
        {"runs": [[*RIGHT[0], 1]]},
        {"runs": [["0", *RIGHT[0][1:]]]},
        {"runs": [[0, 64.0, *RIGHT[0][2:]]]},
        {"runs": [[-16, *RIGHT[0][1:]]]},
        {"runs": [[0, 80, *RIGHT[0][2:]]]},
        {"runs": [[0, 10**30, *RIGHT[0][2:]]]},
        {"runs": [[0, 64, 4, 0, 0, 0, 8, -1, 0]]},
        {"runs": [[0, 64, 3, 32, 0, 0, 8, -1, 0]]},
        {"runs": [[0, 64, 9, 32, 0, 0, 8, -1, 0]]},
        {"runs": [[0, 64, 8, 32, 0, 0, 0, -1, 0]]},
        {"runs": [[0, 64, 4, 32, 1, 1, 8, -1, 0]]},
        {"runs": [[0, 64, 4, 32, 4, 0, 8, -1, 0]]},
        {"runs": [[0, 64, 4, 32, 0, 3, 8, -1, 0]]},
        {"runs": [[0, 64, 4, 32, 0, -1, 8, -1, 0]]},
        {"runs": [[0, 64, 4, 32, 0, 0, 8, 0, 0]]},
        {"runs": [[0, 64, 4, -32, 0, 0, 8, -1, 0]]},
        {"runs": [[0, 64, 4, 96, 0, 0, 8, -1, 0]]},
        {"runs": [[0, 48, 4, 32, 0, 0, 8, -1, 0]]},
        {"runs": [[0, 64, 4, 32, 0, 0, 8, -1, 64]]},
        {"runs": [[0, 64, 4, 32, 2, 0, 8, -1, 0]]},
        {"runs": [[0, 64, 4, 32, 2, 0, 8, -1, 48]]},
        {"runs": [*RIGHT, *RIGHT]},
    ],
)
def test_a_hostile_header_is_packed_again(tmp_path: Path, facts: dict[str, object]) -> None:
    """Such files have right checksums: only another program of the same user can have written
    them."""
    blocks = some_blocks(64, 256)
    expected = loaded(entry_in(tmp_path / "right"), blocks, 64, 256).dense()
    (path,) = [file for file in (tmp_path / "right").rglob("*") if file.is_file()]
    memory = memoryview(path.read_bytes()[-64 * 256 // 2 - 64 * 8 * 2 :])
    weight = NativeBlockWeight((64, 256), torch.float32, "cpu", cache=entry_in(tmp_path))
    store_packed(entry_in(tmp_path), NativeBlockWeight.LAYOUT, memory, {"runs": RIGHT})
    assert weight.restore() and torch.equal(weight.dense(), expected), (
        "the test stores what the weight stores"
    )
    store_packed(entry_in(tmp_path), NativeBlockWeight.LAYOUT, memory, facts)
    assert torch.equal(loaded(entry_in(tmp_path), blocks, 64, 256).dense(), expected)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"null",
        b"[]",
        b'{"key": 1}',
        b"\xff",
        b'{"size": 1e999, "facts": {}, "sum": "", "key": ""}',
        b'{"size": -1, "facts": {}, "sum": "", "key": ""}',
        b'{"size": ' + b"9" * 5000 + b"}",
    ],
)
def test_any_header_text_is_packed_again(tmp_path: Path, text: bytes) -> None:
    entry = entry_in(tmp_path)
    memory = memoryview(b"x" * 300)
    store_packed(entry, "tiles", memory, {})
    (path,) = [file for file in tmp_path.rglob("*") if file.is_file()]
    header = repack._HEAD.pack(repack.MAGIC, len(text), repack.hashlib.sha256(text).digest()) + text
    path.write_bytes(header + bytes(-len(header) % PAGE) + b"x" * 300)
    assert repack.open_packed(entry, "tiles") is None
    assert bytes(store_packed(entry, "tiles", memory, {}).memory) == bytes(memory)


@pytest.mark.parametrize(
    ("number", "told"), [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only")]
)
def test_a_disk_that_takes_nothing_is_told_once(
    tmp_path: Path,
    number: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(path: Path, *args: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(repack, "write_file", refuse)
    memory = memoryview(b"x" * 300)
    for layer in range(3):
        assert (
            store_packed(
                RepackCache(tmp_path, "1", 1 << 30).entry(f"{layer}", {}), "tiles", memory, {}
            ).memory
            == memory
        )
    assert caplog.text.count(told) == 1


def test_packed_weights_that_others_may_change_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = some_blocks(64, 256)
    expected = loaded(entry_in(tmp_path), blocks, 64, 256).dense()
    (folder,) = tmp_path.iterdir()
    folder.chmod(0o777)
    weight = NativeBlockWeight((64, 256), torch.float32, "cpu", cache=entry_in(tmp_path))
    assert not weight.restore() and f"chmod go-w {folder}" in caplog.text
    assert torch.equal(loaded(entry_in(tmp_path), blocks, 64, 256).dense(), expected)
