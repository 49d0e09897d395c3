"""The connector passes the contract of its kind, with a fake of LMCache and, if it is installed,
the real one. What is not the block of its name is computed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fake_lmcache
import pytest
from pegboard_kv_connector_lmcache import probe, store
from pegboard_kv_connector_lmcache.options import LMCacheOptions
from pegboard_kv_connector_lmcache.scheduler import LMCacheScheduler
from pegboard_kv_connector_lmcache.store import LMCacheStore
from pegboard_kv_connector_lmcache.worker import LMCacheWorker

from pegboard.errors import ConfigError
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard.interfaces.spec import Absent
from pegboard.plugins.importing import probe_facts
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_kv_connector import Halves, greedy
from pegboard_testing.contract_kv_states import MovesStates
from pegboard_testing.fake_engine import FakeEngine

LIBRARIES = ["fake"] if find_spec("lmcache") is None else ["fake", "real"]


@pytest.fixture(autouse=True, params=LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "fake":
        monkeypatch.setattr(store, "_library", lambda: fake_lmcache)
    return str(request.param)


@pytest.fixture
def url(tmp_path: Path) -> str:
    folder = tmp_path / "blocks"
    folder.mkdir()
    return f"fs://localhost:0{folder}"


def blocks(library: str, url: str) -> dict[str, bytes]:
    """What is in the remote store, by the names there."""
    if library == "fake":
        return dict(fake_lmcache.stored(url))
    folder = Path("/" + url.partition("://")[2].partition("/")[2])
    return {file.name: file.read_bytes() for file in sorted(folder.rglob("*.data"))}


def change(library: str, url: str, name: str, content: bytes | None) -> None:
    """Put something else there, or nothing."""
    if library == "fake":
        remote = fake_lmcache.REMOTES[url]
        remote.pop(name) if content is None else remote.update({name: content})
        return
    folder = Path("/" + url.partition("://")[2].partition("/")[2])
    (file,) = folder.rglob(name)
    file.unlink() if content is None else file.write_bytes(content)


@pytest.mark.parametrize("name", ["lmcache", "LMCacheConnectorV1"])
def test_entry(name: str) -> None:
    check_entry(installed_entry("kv_connector", name))


class TestLMCache(MovesStates):
    @pytest.fixture(autouse=True)
    def remote(self, library: str, url: str) -> None:
        self.library = library
        self.options = LMCacheOptions(remote_url=url, max_local_cpu_size=0.01)

    def halves(self, setup: KVConnectorSetup) -> Halves:
        return LMCacheScheduler(self.options, setup), LMCacheWorker(self.options, setup)

    @pytest.mark.parametrize("damage", ["other", "short", "gone"])
    def test_what_is_not_the_block_is_computed(self, damage: str) -> None:
        first = self.engine()
        expected = first.generate(range(21), greedy(6)).token_ids
        self.close(first)
        url = self.options.remote_url
        stored = blocks(self.library, url)
        assert len(stored) == 6
        for name, content in list(stored.items())[::2]:
            flipped = content[:-1] + bytes([content[-1] ^ 1])
            others = {"other": flipped, "short": content[:-1], "gone": None}
            change(self.library, url, name, others[damage])
        second = self.engine()
        assert second.generate(range(21), greedy(6)).token_ids == expected
        second.check_idle()
        self.close(second)
        third = self.engine()
        assert third.generate(range(21), greedy(6)).token_ids == expected
        self.close(third)

    @pytest.mark.parametrize(
        ("role", "saves", "loads"), [("kv_producer", True, False), ("kv_consumer", False, True)]
    )
    def test_roles(self, role: Any, saves: bool, loads: bool) -> None:
        both = self.options
        self.options = both.model_copy(update={"role": role})
        first = self.engine()
        first.generate(range(21), greedy(2))
        self.close(first)
        assert bool(blocks(self.library, both.remote_url)) == saves
        self.options = both
        second = self.engine()
        second.generate(range(30, 51), greedy(2))
        self.close(second)
        self.options = both.model_copy(update={"role": role})
        third = self.engine()
        assert (third.generate(range(30, 51), greedy(2)).deltas[0].num_cached_tokens == 20) == loads
        self.close(third)


@pytest.fixture
def setup() -> KVConnectorSetup:
    return KVConnectorSetup(FakeEngine().plan)


def test_blocks_go_and_come(url: str, setup: KVConnectorSetup) -> None:
    options = LMCacheOptions(remote_url=url)
    writer = LMCacheStore(options, setup, 0.01)
    for number in range(20):
        writer.write(number % 2, bytes([number] * 32), memoryview(bytes([number]) * 5000))
    writer.close()
    reader = LMCacheStore(options, setup, 0.01)
    for number in range(20):
        assert reader.has(number % 2, bytes([number] * 32))
        assert not reader.has(1 - number % 2, bytes([number] * 32))
        content = memoryview(bytearray(5000))
        assert reader.read(number % 2, bytes([number] * 32), content)
        assert content == bytes([number]) * 5000
    assert not reader.read(0, bytes(31) + b"x", memoryview(bytearray(5000)))
    reader.close()


def test_a_block_that_does_not_fit(url: str, setup: KVConnectorSetup) -> None:
    """It is not saved, and the next one is."""
    full = LMCacheStore(LMCacheOptions(remote_url=url), setup, 0.01)
    with pytest.raises(OSError, match="max_local_cpu_size"):
        full.write(0, bytes(32), memoryview(bytes(20 << 20)))
    full.write(0, bytes(32), memoryview(bytes(1000)))
    full.close()


def test_a_store_that_is_none(setup: KVConnectorSetup) -> None:
    """The password in the address is not shown."""
    with pytest.raises(ConfigError, match="remote_url='nowhere://a:1'"):
        LMCacheWorker(LMCacheOptions(remote_url="nowhere://me:secret@a:1"), setup)


def test_settings_that_are_none(url: str, setup: KVConnectorSetup) -> None:
    options = LMCacheOptions(remote_url=url, settings={"remote_sedre": "naive"})
    with pytest.raises(ConfigError, match="no setting remote_sedre"):
        LMCacheWorker(options, setup)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, setup: KVConnectorSetup) -> None:
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    answer = probe.probe(probe_facts())
    assert isinstance(answer, Absent) and "pip install lmcache" in answer.reason
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "lmcache.v1.config", None)
    with pytest.raises(ConfigError, match="pip install lmcache"):
        LMCacheWorker(LMCacheOptions(remote_url="fs://a"), setup)
