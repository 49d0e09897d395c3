"""Packed weights come back as they were stored, or not at all."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kernel_cpu.repack import PAGE, Packed, open_packed, store_packed

from pegboard.interfaces.quantization import RepackCache, RepackEntry

FACTS = {"bits": 4, "rows": [0, 64]}


def cache_in(root: Path, digest: str = "sha256:1", limit_bytes: int = 1 << 30) -> RepackCache:
    return RepackCache(root, digest, limit_bytes)


def random_bytes(size: int, seed: int = 0) -> memoryview:
    return memoryview(np.random.default_rng(seed).bytes(size))


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def opened(entry: RepackEntry, layout: str = "tiles-1") -> Packed:
    packed = open_packed(entry, layout)
    assert packed is not None
    return packed


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 3 * PAGE), seed=st.integers(0, 9))
def test_a_later_start_maps_what_was_stored(
    tmp_path_factory: pytest.TempPathFactory, size: int, seed: int
) -> None:
    root = tmp_path_factory.mktemp("cache")
    memory = random_bytes(size, seed)
    first = cache_in(root).entry("layers.0", {"bits": 4})
    assert open_packed(first, "tiles-1") is None
    stored = store_packed(first, "tiles-1", memory, FACTS)
    again = opened(cache_in(root).entry("layers.0", {"bits": 4}))
    for packed in (stored, again):
        assert bytes(packed.memory) == bytes(memory) and packed.facts == FACTS
        assert np.frombuffer(packed.memory, np.uint8).ctypes.data % PAGE == 0


def test_writing_into_mapped_memory_changes_no_file(tmp_path: Path) -> None:
    """Overwrite the memory, as a reload of the weights does."""
    entry = cache_in(tmp_path).entry("layers.0", {})
    memory = random_bytes(PAGE + 5)
    stored = store_packed(entry, "tiles-1", memory, FACTS)
    stored.memory[:] = bytes(len(memory))
    assert bytes(opened(entry).memory) == bytes(memory)


@pytest.mark.parametrize(
    ("digest", "path", "content", "layout"),
    [
        ("sha256:2", "layers.0", {"bits": 4}, "tiles-1"),
        ("sha256:1", "layers.1", {"bits": 4}, "tiles-1"),
        ("sha256:1", "layers.0", {"bits": 8}, "tiles-1"),
        ("sha256:1", "layers.0", {"bits": 4}, "tiles-2"),
    ],
)
def test_nothing_is_taken_for_something_else(
    tmp_path: Path, digest: str, path: str, content: object, layout: str
) -> None:
    store_packed(
        cache_in(tmp_path).entry("layers.0", {"bits": 4}), "tiles-1", random_bytes(100), FACTS
    )
    assert open_packed(cache_in(tmp_path, digest).entry(path, content), layout) is None


@pytest.mark.parametrize("place", ["magic", "header", "first", "middle", "last", "page"])
def test_a_damaged_file_is_noticed_and_made_again(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry = cache_in(tmp_path).entry("layers.0", {})
    memory = random_bytes(5 * PAGE + 9)
    store_packed(entry, "tiles-1", memory, FACTS)
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    if place == "page":  # the two pages are exchanged, which does not change their sums
        data[PAGE : 2 * PAGE], data[2 * PAGE : 3 * PAGE] = (
            data[2 * PAGE : 3 * PAGE],
            data[PAGE : 2 * PAGE],
        )
    else:
        where = {
            "magic": 3,
            "header": data.index(b'"rows"') + 2,
            "first": PAGE,
            "middle": 3 * PAGE + 77,
            "last": len(data) - 1,
        }
        data[where[place]] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert open_packed(entry, "tiles-1") is None
    assert str(path) in caplog.text
    store_packed(entry, "tiles-1", memory, FACTS)
    assert bytes(opened(entry).memory) == bytes(memory)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_truncated_and_arbitrary_files_are_not_taken(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("cache")
    entry = cache_in(root).entry("layers.0", {})
    store_packed(entry, "tiles-1", random_bytes(300), FACTS)
    (path,) = files(root)
    whole = path.read_bytes()
    changed = data.draw(
        st.integers(0, len(whole) - 1).map(lambda end: whole[:end]) | st.binary(max_size=200)
    )
    path.write_bytes(changed)
    assert open_packed(entry, "tiles-1") is None


def test_the_limit_drops_what_was_not_used_for_longest(tmp_path: Path) -> None:
    older = cache_in(tmp_path)
    for number in range(3):
        before = set(files(tmp_path))
        store_packed(older.entry(f"layers.{number}", {}), "tiles-1", random_bytes(PAGE), FACTS)
        (path,) = set(files(tmp_path)) - before
        os.utime(path, (number, number))
    assert len(files(tmp_path)) == 3
    newer = cache_in(tmp_path, "sha256:2", limit_bytes=7 * PAGE)
    # now the most recently used
    assert opened(cache_in(tmp_path).entry("layers.0", {})) is not None
    store_packed(newer.entry("layers.0", {}), "tiles-1", random_bytes(PAGE), FACTS)
    held = [
        open_packed(cache_in(tmp_path).entry(f"layers.{number}", {}), "tiles-1") is not None
        for number in range(3)
    ]
    assert held == [True, False, True] and len(files(tmp_path)) == 3


def test_what_is_in_use_stays_and_the_rest_is_not_kept(tmp_path: Path) -> None:
    cache = cache_in(tmp_path, limit_bytes=5 * PAGE)
    memories = [random_bytes(PAGE, seed) for seed in range(4)]
    stored = [
        store_packed(cache.entry(f"layers.{n}", {}), "tiles-1", memory, FACTS)
        for n, memory in enumerate(memories)
    ]
    assert [bytes(packed.memory) for packed in stored] == [bytes(memory) for memory in memories]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 5 * PAGE
    assert open_packed(cache.entry("layers.0", {}), "tiles-1") and not open_packed(
        cache.entry("layers.3", {}), "tiles-1"
    )
    nothing = cache_in(tmp_path / "none", limit_bytes=0)
    store_packed(nothing.entry("layers.0", {}), "tiles-1", memories[0], FACTS)
    assert not files(tmp_path / "none")


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "repacked").write_text("there is a file instead of the folder")
    cache = cache_in(tmp_path / "repacked")
    memory = random_bytes(100)
    with caplog.at_level(logging.INFO):
        for number in range(3):
            packed = store_packed(cache.entry(f"layers.{number}", {}), "tiles-1", memory, FACTS)
            assert packed.memory == memory and packed.facts == FACTS
    assert caplog.text.count("are not kept") == 1


def test_a_full_disk_leaves_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    memory = random_bytes(100)
    assert (
        store_packed(cache_in(tmp_path).entry("layers.0", {}), "tiles-1", memory, FACTS).memory
        == memory
    )
    assert not files(tmp_path)


def test_several_writers_of_one_weight(tmp_path: Path) -> None:
    memory = random_bytes(40 * PAGE)
    found: list[bytes] = []

    def write() -> None:
        for _ in range(5):
            found.append(
                bytes(
                    store_packed(
                        cache_in(tmp_path).entry("layers.0", {}), "tiles-1", memory, FACTS
                    ).memory
                )
            )

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {bytes(memory)} and len(found) == 20
    assert len(files(tmp_path)) == 1
