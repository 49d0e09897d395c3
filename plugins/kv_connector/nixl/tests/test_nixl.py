"""Engines read each other's blocks with NIXL: the contract of engines that exchange blocks, what
NIXL refuses, and engines that end. All tests run with a fake of the library, and with the real one
if it is installed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fake_nixl
import nixl_peer
import pytest
from nixl_peer import worker
from pegboard_kv_connector_nixl import probe, transport
from pegboard_kv_connector_nixl.transport import NixlTransport

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
    until,
)

needs_library = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
LIBRARIES = ["fake"] if find_spec("nixl") is None else ["fake", "real"]


@pytest.fixture(autouse=True, params=LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "fake":
        monkeypatch.setattr(transport, "_library", lambda: fake_nixl)
    return str(request.param)


@pytest.mark.parametrize("name", ["nixl", "NixlConnector"])
def test_entry(name: str) -> None:
    check_entry(installed_entry("kv_connector", name))


# --- the library ----------------------------------------------------------------------------------


@pytest.fixture
def two() -> Iterator[tuple[NixlTransport, NixlTransport]]:
    first, second = NixlTransport(1 << 20, ("UCX",)), NixlTransport(1 << 20, ("UCX",))
    yield first, second
    first.close()
    second.close()


Two = tuple[NixlTransport, NixlTransport]


def test_read(two: Two) -> None:
    first, second = two
    check_read(first, second)
    assert second._late == []


def test_what_is_refused(two: Two) -> None:
    """An address or a buffer that is not registered, and an endpoint that is none. The next read
    works."""
    first, second = two
    there = part(first, b"a" * 100)
    here = part(second, bytes(100))
    end = first.memory.address + first.memory.num_bytes  # type: ignore[attr-defined]
    refused: list[tuple[bytes, int, memoryview, str]] = [
        (first.endpoint, end, here, "NOT_FOUND"),
        (first.endpoint, end - 50, here, "NOT_FOUND"),
        (first.endpoint, address_of(there), memoryview(bytearray(100)), "NOT_FOUND"),
        (b"something else", address_of(there), here, "MISMATCH"),
    ]
    for endpoint, address, buffer, message in refused:
        with pytest.raises(PeerError, match=message):
            second.read(endpoint, [(address, buffer)], soon())
    second.read(first.endpoint, [(address_of(there), here)], soon())
    assert bytes(here) == b"a" * 100


def test_the_library_itself_refuses(two: Two) -> None:
    """What no transport asks for: the fake answers as the real one does."""
    first, second = two
    there, here = part(first, b"a" * 100), part(second, bytes(100))
    agent = second._agent

    def descriptors(*parts: tuple[int, int]) -> Any:
        return agent.get_xfer_descs([(address, size, 0) for address, size in parts], "DRAM")

    theirs, ours = address_of(there), address_of(here)
    with pytest.raises(Exception, match="NOT_FOUND"):
        agent.initialize_xfer("READ", descriptors((ours, 9)), descriptors((theirs, 9)), "nobody")
    name = agent.add_remote_agent(first.endpoint)
    assert agent.add_remote_agent(first.endpoint) == name
    with pytest.raises(Exception, match="INVALID_PARAM"):
        agent.initialize_xfer("READ", descriptors((ours, 9)), descriptors((theirs, 8)), name)
    with pytest.raises(Exception, match="INVALID_PARAM"):
        agent.initialize_xfer(
            "READ", descriptors((ours, 4), (ours + 4, 4)), descriptors((theirs, 8)), name
        )
    with pytest.raises(IndexError):
        descriptors()
    again = agent.register_memory([(ours, 100, 0, "")], "DRAM")
    agent.deregister_memory(again)


def test_an_agent_that_has_ended(two: Two) -> None:
    first, second = two
    address, here = address_of(part(first, b"a" * 100)), part(second, bytes(100))
    second.read(first.endpoint, [(address, here)], soon())
    endpoint = first.endpoint
    first.close()

    def is_refused() -> bool:
        try:
            second.read(endpoint, [(address, here)], soon())
        except PeerError:
            return True
        return False

    until(is_refused)  # the real library notices it a little later
    assert is_refused()
    assert second._agents == {}


@pytest.mark.parametrize("backends", [("NOPE",), ("GDS",), ("UCX", "NOPE")], ids=str)
def test_backends_that_cannot_be_used(backends: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=backends[-1]):
        NixlTransport(1 << 20, backends)


def test_a_read_that_hangs(library: str, two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffer stays in use until it ends."""
    if library == "real":
        pytest.skip("the real library cannot be told to hang")
    first, second = two
    there = part(first, b"a" * 100)
    here = part(second, bytes(second.memory.num_bytes))  # type: ignore[attr-defined]
    monkeypatch.setattr(fake_nixl.nixl_agent, "hangs", True)
    with pytest.raises(PeerError, match="not ended in time"):
        second.read(first.endpoint, [(address_of(there), here[:100])], time.monotonic() + 0.01)
    del here
    assert second.memory.take(100) is None
    monkeypatch.undo()
    monkeypatch.setattr(transport, "_library", lambda: fake_nixl)
    second._release_late()
    assert second.memory.take(100) is not None


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    answer = probe.probe(probe_facts())
    assert isinstance(answer, Absent) and "pip install nixl" in answer.reason
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match="pip install nixl"):
        NixlTransport(1 << 20, ("UCX",))


# --- engines --------------------------------------------------------------------------------------


class TestNixl(ReadingContract):
    def worker(self, setup: KVConnectorSetup, **options: Any) -> PeerWorker:
        return worker(setup, **options)


@needs_library
@pytest.mark.parametrize("library", ["real"], indirect=True)
def test_two_processes() -> None:
    check_two_processes(worker, Path(nixl_peer.__file__))
