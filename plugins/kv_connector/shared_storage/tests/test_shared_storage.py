"""The connector passes the contract of its kind. Files that are not the block of their name are
refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pegboard_kv_connector_shared_storage.folder import BlockFolder
from pegboard_kv_connector_shared_storage.options import SharedStorageOptions
from pegboard_kv_connector_shared_storage.scheduler import SharedStorageScheduler
from pegboard_kv_connector_shared_storage.worker import SharedStorageWorker

from pegboard.errors import ConfigError
from pegboard.interfaces.attention import Full, State, Window
from pegboard.interfaces.kv_connector import KVConnectorSetup, Match
from pegboard.interfaces.scheduling_policy import RequestView
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_kv_connector import Halves, greedy
from pegboard_testing.contract_kv_states import MovesStates
from pegboard_testing.fake_engine import FakeEngine

Damage = Callable[[Path], object]


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def another_identity(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"identity":"a"', b'"identity":"b"'))


def another_shape(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"shape":[4]', b'"shape":[9]'))


def huge_header(file: Path) -> None:
    file.write_bytes(b"\xff" * 7 + file.read_bytes()[7:])


def to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def to_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def to_link(file: Path) -> None:
    real = file.rename(file.with_suffix(".real"))
    file.symlink_to(real)


DAMAGES = [
    truncate,
    empty,
    lengthen,
    flip_a_bit,
    another_identity,
    another_shape,
    huge_header,
    to_folder,
    to_pipe,
    to_link,
]


@pytest.mark.parametrize("name", ["shared_storage", "SharedStorageConnector", "ExampleConnector"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("kv_connector", name))


class TestSharedStorage(MovesStates):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.options = SharedStorageOptions(shared_storage_path=tmp_path / "kv")

    def halves(self, setup: KVConnectorSetup) -> Halves:
        return SharedStorageScheduler(self.options, setup), SharedStorageWorker(self.options, setup)

    def files(self) -> list[Path]:
        return sorted(self.options.shared_storage_path.rglob("*.safetensors"))

    @pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
    @pytest.mark.parametrize("policy", ["recompute", "fail"])
    def test_damaged_files_are_never_read_as_kv(self, damage: Damage, policy: Any) -> None:
        first = self.engine([Full(), Window(6)])
        expected = first.generate(range(21), greedy(6)).token_ids
        self.close(first)
        for number, file in enumerate(self.files()):
            if number % 3 == 1:
                damage(file)
        second = self.engine([Full(), Window(6)], kv_load_failure_policy=policy)
        result = second.generate(range(21), greedy(6))
        if policy == "fail":
            assert result.finish_reason == "error" and "kv_load_failure_policy" in (
                result.deltas[-1].error or ""
            )
        else:
            assert result.token_ids == expected
        second.check_idle()
        self.close(second)
        if policy == "recompute" and damage is not to_folder:
            third = self.engine([Full(), Window(6)])
            assert third.generate(range(21), greedy(6)).token_ids == expected
            assert third.engine.stats()["external_prefix_cache_hits_total"] == 20, (
                "the files were written again"
            )
            self.close(third)

    def test_states_that_are_gone_between_match_and_load(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = self.engine([Full(), State(8)])
        expected = first.generate(range(21), greedy(6)).token_ids
        self.close(first)
        second = self.engine([Full(), State(8)])
        assert second.connector is not None
        match = second.connector.match

        def evicted(request: RequestView, num_local_tokens: int) -> Match | None:
            answer = match(request, num_local_tokens)
            for file in self.files():
                if file.name.startswith("1-"):
                    file.unlink()
            return answer

        monkeypatch.setattr(second.connector, "match", evicted)
        result = second.generate(range(21), greedy(6))
        assert (result.token_ids, result.deltas[0].num_cached_tokens) == (expected, 0)
        assert second.engine.stats()["external_prefix_cache_hits_total"] == 0
        second.check_idle()
        self.close(second)

    def test_requests_that_share_states_load_them_once(self) -> None:
        first = self.engine([Full(), State(8)])
        expected = first.generate(range(21), greedy(6)).token_ids
        self.close(first)
        second = self.engine([Full(), State(8)])
        for name in "abc":
            second.add(name, range(21), greedy(6))
        second.run()
        assert {tuple(result.token_ids) for result in second.results.values()} == {tuple(expected)}
        stats = second.engine.stats()
        names = ("external_prefix_cache_hits_total", "prefix_cache_hits_total")
        assert [stats[name] for name in names] == [16, 32]
        second.check_idle()
        self.close(second)

    def test_a_block_under_another_name_is_refused(self) -> None:
        first = self.engine()
        expected = [
            first.generate(prompt, greedy(6)).token_ids for prompt in (range(21), range(30, 51))
        ]
        self.close(first)
        files = self.files()
        contents = [file.read_bytes() for file in files]
        for file, content in zip(files, [*contents[1:], contents[0]], strict=True):
            file.write_bytes(content)
        second = self.engine()
        assert [
            second.generate(prompt, greedy(6)).token_ids for prompt in (range(21), range(30, 51))
        ] == expected
        self.close(second)

    @pytest.mark.parametrize(
        ("role", "saves", "loads"), [("kv_producer", True, False), ("kv_consumer", False, True)]
    )
    def test_roles(self, role: Any, saves: bool, loads: bool) -> None:
        both = self.options
        self.options = self.options.model_copy(update={"role": role})
        first = self.engine()
        first.generate(range(21), greedy(2))
        self.close(first)
        assert bool(self.files()) == saves
        self.options = both
        second = self.engine()
        second.generate(range(30, 51), greedy(2))
        self.close(second)
        self.options = self.options.model_copy(update={"role": role})
        third = self.engine()
        assert (third.generate(range(30, 51), greedy(2)).deltas[0].num_cached_tokens == 20) == loads
        self.close(third)

    def test_the_least_recently_used_blocks_are_deleted(self) -> None:
        first = self.engine()
        for number in range(4):
            first.generate(range(10 * number, 10 * number + 21), greedy(1))
        self.close(first)
        files = self.files()
        (self.options.shared_storage_path / "mine.txt").write_text("not a block")
        size = sum(file.stat().st_size for file in files)
        for file in files:
            os.utime(file, (1, 1))
        self.options = self.options.model_copy(update={"max_size_gb": size / 2**30})
        second = self.engine()
        # used again, so it stays
        assert second.generate(range(21), greedy(1)).deltas[0].num_cached_tokens == 20
        second.generate(range(40, 61), greedy(1))
        self.close(second)
        assert sum(file.stat().st_size for file in self.files()) <= size
        assert (self.options.shared_storage_path / "mine.txt").exists()
        third = self.engine()
        assert third.generate(range(21), greedy(1)).deltas[0].num_cached_tokens == 20
        assert third.generate(range(40, 61), greedy(1)).deltas[0].num_cached_tokens == 20
        self.close(third)

    def test_a_full_disk_is_a_warning(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def full(source: str, destination: str) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        engine = self.engine()
        engine.generate(range(21), greedy(9))
        self.close(engine)
        assert [
            record.getMessage() for record in caplog.records if record.levelname == "WARNING"
        ] == ["a KV block cannot be saved: [Errno 28] No space left on device"]
        assert not [path for path in self.options.shared_storage_path.rglob("*") if path.is_file()]

    @pytest.mark.parametrize("room", [0, 1, 3.5, 99])
    @pytest.mark.parametrize("disk_is_full", [False, True])
    def test_what_waits_to_be_written_is_bounded(
        self, monkeypatch: pytest.MonkeyPatch, room: float, disk_is_full: bool
    ) -> None:
        """What does not fit is not saved, and nothing stays counted."""
        may_write = threading.Event()
        write = BlockFolder.write

        def slow(folder: BlockFolder, *block: Any) -> None:
            may_write.wait()
            if disk_is_full:
                raise OSError(28, "No space left on device")
            write(folder, *block)

        monkeypatch.setattr(BlockFolder, "write", slow)
        halves = []
        plain = self.halves

        def kept(setup: KVConnectorSetup) -> Halves:
            halves.append(plain(setup))
            return halves[-1]

        monkeypatch.setattr(self, "halves", kept)
        engine = self.engine()
        (_, worker) = halves[-1]
        assert isinstance(worker, SharedStorageWorker)
        num_bytes = worker.rows[0].num_bytes
        monkeypatch.setattr("pegboard_kv.store_worker.MAX_WAITING_BYTES", int(room * num_bytes))
        engine.generate(range(21), greedy(6))
        assert (
            len(worker._waiting) * num_bytes
            == worker._waiting_bytes
            == min(int(room), 6) * num_bytes
        )
        may_write.set()
        engine.check_idle()
        self.close(engine)
        assert (worker._waiting_bytes, worker._waiting) == (0, set())
        assert len(self.files()) == (0 if disk_is_full else min(int(room), 6))

    def test_engines_in_other_processes_write_the_same_blocks(self) -> None:
        """Many writers at once: every name shows a whole block at any time."""
        engine = self.engine()
        engine.generate(range(21), greedy(6))
        self.close(engine)
        file = self.files()[0]
        block_hash = bytes.fromhex(file.stem.partition("-")[2])
        folder = BlockFolder.open(self.options, KVConnectorSetup(engine.plan))
        content = file.read_bytes()
        with ThreadPoolExecutor(8) as pool:
            writes = [
                pool.submit(folder.write, 0, block_hash, [content[:100], content[100:]])
                for _ in range(200)
            ]
            while not all(write.done() for write in writes):
                found = bytearray(len(content))
                folder.read(0, block_hash, [found])
                assert found == content
        assert all(write.exception() is None for write in writes)
        assert not list(self.options.shared_storage_path.rglob("*.tmp"))


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = SharedStorageOptions(shared_storage_path=tmp_path / "file")
    with pytest.raises(
        ConfigError,
        match=r"shared_storage_path: cannot make a folder in .*file: .*; name another folder",
    ):
        SharedStorageWorker(options, KVConnectorSetup(FakeEngine().plan))
