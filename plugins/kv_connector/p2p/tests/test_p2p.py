"""Engines exchange blocks over TCP: the contract with two engines, pulls, pushes, several of each,
and all that can go wrong with the other engine."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pegboard_kv_connector_p2p.worker import P2PWorker

from pegboard import env
from pegboard.engine.actions import ResetPrefixCache
from pegboard.errors import ConfigError
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.peers.book import AddressBook
from pegboard_kv.peers.options import PeerOptions
from pegboard_kv.peers.store import HostStore
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_peers import (
    ASK,
    PeersContract,
    Start,
    loads_nothing,
    peers,
    until,
)
from pegboard_testing.fake_engine import FakeEngine


def test_entry() -> None:
    check_entry(installed_entry("kv_connector", "p2p"))


# --- the contract ---------------------------------------------------------------------------------


def worker(setup: KVConnectorSetup, **options: Any) -> P2PWorker:
    return P2PWorker(PeerOptions(**options), setup)


class TestP2P(PeersContract):
    def worker(self, setup: KVConnectorSetup, **options: Any) -> P2PWorker:
        return worker(setup, **options)


@pytest.fixture
def start() -> Iterator[Start]:
    yield from peers(worker)


def test_other_requests_do_not_save(start: Start) -> None:
    first = start()
    first.run({})
    assert first.worker.store._blocks == {}


# --- what goes wrong ------------------------------------------------------------------------------


def test_another_engine_says_how_it_differs(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    first, second = start(identity="a"), start(identity="b")
    first.worker._engine.facts = {"dtype": "float32", "block_sizes": "16"}
    second.worker._engine.facts = {"dtype": "bfloat16", "block_sizes": "16"}
    _, told, _ = first.run(ASK)
    loads_nothing(second, told)
    until(lambda: "this engine has bfloat16, the other engine has float32" in caplog.text)
    until(lambda: "this engine has float32, the other engine has bfloat16" in caplog.text)
    assert "block_sizes" not in caplog.text and "have other names" not in caplog.text


def test_blocks_with_other_names(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is asked for. The engines may have got weights that are not the same."""
    first, second = start(), start()
    _, told, _ = first.run(ASK)
    for different in ("00" * 32, "", None, 5):
        loads_nothing(second, {**told, "remote_first_hash": different}, 1.0)
        assert second.engine.ask(ResetPrefixCache())
    until(lambda: "have other names at" in caplog.text)
    assert caplog.text.count("have other names at") == 1


@pytest.mark.parametrize(
    "where",
    [
        {"remote_host": "192.0.2.1", "remote_port": 1},
        {"remote_host": "example.org", "remote_port": 80},
        {"remote_host": "127.0.0.1", "remote_port": 0},
        {"remote_host": "127.0.0.1", "remote_port": "x"},
        {"remote_host": ["127.0.0.1"], "remote_port": 5},
        {"remote_host": "127.0.0.1", "remote_port": True},
        {"remote_num_tokens": "24"},
        {"remote_num_tokens": -5},
    ],
    ids=str,
)
def test_what_clients_may_not_name(
    start: Start, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing connects to a host that is not one of the peers."""
    peer = start(timeout_s=0.5)
    known = start().run(ASK)[1]["remote_first_hash"]
    monkeypatch.setattr(socket, "create_connection", None)
    told = {
        "do_remote_prefill": True,
        "remote_num_tokens": 24,
        "remote_first_hash": known,
        **where,
    }
    loads_nothing(peer, told, 1.0)
    peer.run({**ASK, **where})


def serve(answer: Callable[[socket.socket], object]) -> tuple[int, socket.socket]:
    """Return the port of a server that treats each connection so, and its socket."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                answer(connection)

    threading.Thread(target=run, daemon=True).start()
    return listener.getsockname()[1], listener


@pytest.mark.parametrize(
    "answer",
    [
        lambda connection: connection.close(),
        lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        lambda connection: connection.sendall(b"\xff\xff\xff\xff"),
        lambda connection: connection.sendall(b"\0\0\0\2\x93\xc1"),
        lambda connection: time.sleep(2),
    ],
    ids=["closes", "HTTP", "huge", "no msgpack", "hangs"],
)
def test_something_else_answers(start: Start, answer: Callable[[socket.socket], object]) -> None:
    second = start(timeout_s=1.0)
    port, listener = serve(answer)
    with listener:
        told = {
            "do_remote_prefill": True,
            "remote_host": "127.0.0.1",
            "remote_port": port,
            "remote_num_tokens": 24,
            "remote_first_hash": start().run(ASK)[1]["remote_first_hash"],
        }
        loads_nothing(second, told, 8.0)
        loads_nothing(second, told, 1.0)


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"", b"\0\0\0\1\xc1", b"\0\0\0\5hello"],
    ids=["HTTP", "huge", "nothing", "no msgpack", "text"],
)
def test_something_else_calls(start: Start, sent: bytes) -> None:
    first, second = start(), start()
    with socket.create_connection(("127.0.0.1", first.port)) as connection:
        connection.sendall(sent)
    tokens, told, _ = first.run(ASK)
    assert second.run(told) == (tokens, None, 20)


def test_a_damaged_block(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checksum is not that of its content."""
    first, second = start(), start()
    _, told, _ = first.run(ASK)

    def damaged(connection: socket.socket, content: memoryview) -> None:
        connection.sendall(zlib.crc32(content).to_bytes(4, "big"))
        connection.sendall(bytes([content[0] ^ 1]) + content[1:])

    monkeypatch.setattr("pegboard_kv.peers.transport.send_block", damaged)
    loads_nothing(second, told)


@pytest.mark.parametrize("keys", [("a", "a"), ("a", "b"), ("a", None), (None, "b")])
def test_keys(
    start: Start,
    keys: tuple[str | None, str | None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engines = []
    for key in keys:
        monkeypatch.delenv(env.CLUSTER_KEY, raising=False)
        if key is not None:
            monkeypatch.setenv(env.CLUSTER_KEY, key)
        engines.append(start())
    first, second = engines
    tokens, told, _ = first.run(ASK)
    if keys[0] == keys[1]:
        assert second.run(told) == (tokens, None, 20)
    else:
        loads_nothing(second, told)
        assert env.CLUSTER_KEY in caplog.text


def test_a_host_that_others_reach_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.CLUSTER_KEY, raising=False)
    setup = KVConnectorSetup(FakeEngine().plan)
    with pytest.raises(ConfigError, match=f"set {env.CLUSTER_KEY} to the same random text"):
        P2PWorker(PeerOptions(host="0.0.0.0"), setup)


def test_a_port_that_is_taken(start: Start) -> None:
    first = start()
    with pytest.raises(ConfigError, match=f"127.0.0.1:{first.port}.*its own host and port"):
        start(port=first.port)


def test_the_address_book() -> None:
    book = AddressBook(["10.0.0.0/24", "192.168.1.7", "fd00::/8", "prefill.example"])
    for host in ("10.0.0.9", "192.168.1.7", "fd00::1", "Prefill.example", "::ffff:10.0.0.9"):
        assert book.has(host), host
    for host in ("10.0.1.9", "192.168.1.8", "decode.example", "", "prefill.example.org", "::1"):
        assert not book.has(host), host
    for text in ("a b", "http://x", "10.0.0.0/99", ""):
        with pytest.raises(ConfigError, match="is not a host"):
            AddressBook([text])


def test_the_store_keeps_the_newest() -> None:
    store = HostStore(30)
    for number in range(4):
        store.put((0, bytes([number])), memoryview(bytes(10)))
        assert (0, b"\0") in store
    assert [(0, bytes([number])) in store for number in range(4)] == [True, False, True, True]
    store.put((0, b"large"), memoryview(bytes(31)))
    assert (0, b"\0") not in store and (0, b"large") not in store
