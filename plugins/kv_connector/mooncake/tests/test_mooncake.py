"""Engines read each other's blocks with Mooncake: the contract of engines that exchange blocks,
what Mooncake refuses, and engines that end. All tests run with a fake of the library, and with the
real one if it can be imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import fake_mooncake
import mooncake_peer
import pytest
from mooncake_peer import worker
from pegboard_kv_connector_mooncake import probe, transport
from pegboard_kv_connector_mooncake.options import MooncakeOptions
from pegboard_kv_connector_mooncake.transport import MooncakeTransport

from pegboard.errors import ConfigError
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard.interfaces.spec import Absent
from pegboard.plugins.importing import probe_facts
from pegboard_kv.peers.memory import address_of
from pegboard_kv.peers.wire import PeerError
from pegboard_kv.peers.worker import PeerWorker
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_peers import (
    ReadingContract,
    check_read,
    check_two_processes,
    part,
    soon,
)


def has_library() -> bool:
    try:
        import_module("mooncake.engine")
    except ImportError:
        return False
    return True


needs_library = pytest.mark.skipif(not has_library(), reason="mooncake cannot be imported")


@pytest.fixture(autouse=True, params=["fake", "real"] if has_library() else ["fake"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "fake":
        monkeypatch.setattr(transport, "_library", lambda: fake_mooncake)
    return str(request.param)


@pytest.mark.parametrize("name", ["mooncake", "MooncakeConnector"])
def test_entry(name: str) -> None:
    check_entry(installed_entry("kv_connector", name))


# --- the library ----------------------------------------------------------------------------------

Two = tuple[MooncakeTransport, MooncakeTransport]
OPTIONS = MooncakeOptions(size_gb=2**-10, mooncake_protocol="tcp")


@pytest.fixture
def two() -> Iterator[Two]:
    first, second = MooncakeTransport(OPTIONS), MooncakeTransport(OPTIONS)
    yield first, second
    first.close()
    second.close()


def test_read(two: Two) -> None:
    first, second = two
    check_read(first, second)


def test_what_is_refused(two: Two) -> None:
    """An address that is not registered, and an endpoint that is none. The next read works. The
    buffers of reads that have failed stay in use for a while."""
    first, second = two
    there = part(first, b"a" * 100)
    end = address_of(there) + OPTIONS.num_bytes
    for endpoint, address in [
        (first.endpoint, end),
        (first.endpoint, end - 50),
        (b"127.0.0.1:1", address_of(there)),
        (b"\xff", address_of(there)),
    ]:
        with pytest.raises(PeerError, match="cannot read its memory"):
            second.read(endpoint, [(address, part(second, bytes(100)))], soon())
    here = part(second, bytes(100))
    second.read(first.endpoint, [(address_of(there), here)], soon())
    assert bytes(here) == b"a" * 100
    assert len(second._failed) == 4


def test_the_library_itself_refuses(two: Two) -> None:
    """What no transport asks for: the fake answers as the real one does."""
    first, second = two
    there, here = address_of(part(first, b"a" * 100)), address_of(part(second, bytes(100)))
    target = first.endpoint.decode()
    engine = second._engine
    assert engine.register_memory(here, 100) == -7
    assert engine.batch_transfer_sync_read(target, [here, here + 9], [there], [9]) == -1
    elsewhere = memoryview(bytearray(100))
    address = address_of(elsewhere)
    assert engine.batch_transfer_sync_read(target, [address], [there], [100]) == 0
    assert bytes(elsewhere) == b"a" * 100
    assert engine.unregister_memory(address) == -3


def test_an_engine_that_has_ended(two: Two) -> None:
    first, second = two
    address, here = address_of(part(first, b"a" * 100)), part(second, bytes(100))
    second.read(first.endpoint, [(address, here)], soon())
    endpoint = first.endpoint
    first.close()
    for side in (second, second, first):
        with pytest.raises(PeerError):
            side.read(endpoint, [(address, here)], soon())


@pytest.mark.parametrize("call", ["initialize", "register_memory"])
def test_a_library_that_fails(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(transport, "_library", lambda: fake_mooncake)
    monkeypatch.setattr(fake_mooncake.TransferEngine, call, lambda *arguments: -1)
    with pytest.raises(ConfigError, match="mooncake cannot use"):
        MooncakeTransport(OPTIONS)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    answer = probe.probe(probe_facts())
    assert isinstance(answer, Absent) and "pip install mooncake-transfer" in answer.reason
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ConfigError, match="pip install mooncake-transfer"):
        MooncakeTransport(OPTIONS)


# --- engines --------------------------------------------------------------------------------------


class TestMooncake(ReadingContract):
    def worker(self, setup: KVConnectorSetup, **options: Any) -> PeerWorker:
        return worker(setup, **options)


@needs_library
@pytest.mark.parametrize("library", ["real"], indirect=True)
def test_two_processes() -> None:
    check_two_processes(worker, Path(mooncake_peer.__file__))
