"""The executor `mp` on two hosts, which are two processes here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_executor_local.handshake import Stranger, admit, introduce
from pegboard_executor_local.processes import ProcessExecutor

from pegboard.engine.boundary.spawn import Child
from pegboard.errors import ConfigError, EngineDeadError, PluginBroken
from pegboard.interfaces.executor import (
    ExecutorSetup,
    Hosts,
    Place,
    WorkerDeath,
    WorkerLike,
    WorkerReady,
)
from pegboard_testing.contract_executor import (
    SOON_S,
    ExecutorContract,
    RecordingWorker,
    is_running,
    make_batch,
)

sys.path.insert(0, str(Path(__file__).parent))  # for this process and those of the ranks

import mp_workers

SECOND_HOST = "mp_workers:run_second_host"
ENGINE = """
import sys, time
from pegboard.engine.boundary.spawn import Child
from pegboard.interfaces.executor import ExecutorSetup, Hosts
from pegboard_executor_local.processes import ProcessExecutor
from pegboard_testing.contract_executor import RecordingWorker
hosts = Hosts(2, 0, "127.0.0.1", int(sys.argv[1]))
executor = ProcessExecutor(None, ExecutorSetup(RecordingWorker, 2, Child, hosts=hosts))
executor.start()
print(*executor.call("pid"), flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGBOARD_CLUSTER_KEY", "a secret")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class OnTwoHosts(ProcessExecutor):
    """Starts the second host too."""

    def __init__(self, setup: ExecutorSetup, **second: int) -> None:
        port = free_port()
        hosts = Hosts(2, 0, "127.0.0.1", port)
        super().__init__(None, replace(setup, hosts=hosts))
        arguments = {"port": port, "hosts": 2, "ranks": setup.ranks // 2, **second}
        self.second = Child(SECOND_HOST, role="second host", **arguments)
        self.was_started = False

    def start(self) -> list[WorkerReady]:
        self.was_started = True
        return super().start()

    def stop(self) -> None:
        super().stop()
        if not self.was_started:
            self.second.kill()  # it waits for the engine
        self.second.end((SOON_S, 1.0, 1.0))


@pytest.mark.sampled(4)
class TestTwoHosts(ExecutorContract):
    ranks = 2
    sampling = range(2)

    def executor(self, setup: ExecutorSetup) -> OnTwoHosts:
        return OnTwoHosts(setup)


def setup_of(
    worker: Callable[[Place], WorkerLike] = RecordingWorker, ranks: int = 4
) -> ExecutorSetup:
    return ExecutorSetup(worker, ranks, Child, range(ranks))


@pytest.fixture
def running() -> Iterator[OnTwoHosts]:
    executor = OnTwoHosts(setup_of())
    executor.start()
    yield executor
    executor.stop()


def test_hosts_have_equally_many_neighbors(running: OnTwoHosts) -> None:
    places = running.call("place")
    assert [(p.rank, p.ranks, p.local_rank, p.local_ranks) for p in places] == [
        (0, 4, 0, 2),
        (1, 4, 1, 2),
        (2, 4, 0, 2),
        (3, 4, 1, 2),
    ]
    assert {place.address for place in places} == {
        f"tcp://127.0.0.1:{running._setup.hosts.port + 1}"
    }


def test_a_host_ends_in_order_with_the_engine(running: OnTwoHosts) -> None:
    assert running.submit(make_batch(1)).result().step == 1
    running.stop()
    assert running.second.exitcode == 0


def test_a_dead_rank_is_named_with_its_host(running: OnTwoHosts) -> None:
    pids = running.call("pid")
    os.kill(pids[3], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"worker 3 died: signal SIGKILL, on host \S+"):
        running.call("pid")
    running.stop()
    assert running.second.exitcode == 1
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_host_is_noticed(running: OnTwoHosts, number: signal.Signals) -> None:
    pids = running.call("pid")
    deaths: list[WorkerDeath] = []
    noticed = threading.Event()
    running.watch(lambda death: (deaths.append(death), noticed.set()))
    os.kill(running.second.pid, number)
    assert noticed.wait(SOON_S)
    assert deaths[0].rank in (2, 3) and "on host" in deaths[0].reason
    running.stop()
    wait_until_gone(pids)


def test_a_host_without_an_engine_ends_with_an_error() -> None:
    port = free_port()
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(port)], stdout=subprocess.PIPE, text=True
    )
    second = Child(SECOND_HOST, role="second host", port=port, hosts=2, ranks=1)
    pids = [int(pid) for pid in engine.stdout.readline().split()]
    engine.kill()
    engine.wait()
    engine.stdout.close()
    second.join(SOON_S)
    assert second.exitcode == 1
    second.end((0.0, 0.0, 0.0))
    assert len(pids) == 2
    wait_until_gone(pids)


def wait_until_gone(pids: list[int]) -> None:
    """Wait for processes that are not children of this one. Whoever inherits them may leave them as
    zombies."""
    limit = time.monotonic() + SOON_S
    while not all(has_ended(pid) for pid in pids):
        assert time.monotonic() < limit
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


def test_other_plugins_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    setup = replace(setup_of(), check_plugins=mp_workers.no_plugins_in_common)
    executor = OnTwoHosts(setup)
    with pytest.raises(PluginBroken, match=r"acme \(here 1, there 2\)"):
        executor.start()
    executor.stop()
    assert executor.second.exitcode == 2
    assert "acme (here 1, there 2)" in capfd.readouterr().err


@pytest.mark.parametrize("second", [{"hosts": 3}, {"ranks": 1}, {"number": 0}, {"number": 2}])
def test_hosts_that_do_not_fit_are_refused(second: dict[str, int]) -> None:
    executor = OnTwoHosts(setup_of(), **second)
    with pytest.raises(ConfigError, match="give every host the same sizes and its own node_rank"):
        executor.start()
    executor.stop()
    assert executor.second.exitcode == 2


def test_two_hosts_of_one_number_are_refused() -> None:
    port = free_port()
    hosts = Hosts(3, 0, "127.0.0.1", port)
    executor = ProcessExecutor(None, replace(setup_of(ranks=3), hosts=hosts))
    others = [Child(SECOND_HOST, role="other host", port=port, hosts=3, ranks=1) for _ in range(2)]
    with pytest.raises(ConfigError, match="both have node_rank 1"):
        executor.start()
    executor.stop()
    for other in others:
        other.end((SOON_S, 1.0, 1.0))
        assert other.exitcode in (1, 2)  # 2 = while it joined


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        hosts = Hosts(2, 0, "127.0.0.1", taken.getsockname()[1])
        executor = ProcessExecutor(None, replace(setup_of(), hosts=hosts))
        with pytest.raises(ConfigError, match="cannot listen at .*in use.*; master_addr must be"):
            executor.start()
        executor.stop()


def test_a_key_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEGBOARD_CLUSTER_KEY")
    hosts = Hosts(2, 0, "127.0.0.1", free_port())
    executor = ProcessExecutor(None, replace(setup_of(), hosts=hosts))
    with pytest.raises(ConfigError, match="PEGBOARD_CLUSTER_KEY to the same random text"):
        executor.start()
    executor.stop()


def test_strangers_do_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    """One says nothing, one says something else, and one has another key."""
    port = free_port()
    hosts = Hosts(2, 0, "127.0.0.1", port)
    executor = ProcessExecutor(None, replace(setup_of(ranks=2), hosts=hosts))
    started = threading.Thread(target=executor.start)
    started.start()
    silent, loud = (connected(port) for _ in range(2))
    loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    with connected(port) as other, pytest.raises(Stranger, match="it refuses the key"):
        introduce(other, b"another key", {"number": 1, "name": "x", "rank": 0})
    second = Child(SECOND_HOST, role="second host", port=port, hosts=2, ranks=1)
    started.join(SOON_S)
    assert not started.is_alive() and len(executor.call("pid")) == 2
    for end in (silent, loud):
        end.close()
    executor.stop()
    second.end((SOON_S, 1.0, 1.0))
    assert second.exitcode == 0


def connected(port: int) -> socket.socket:
    limit = time.monotonic() + SOON_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), SOON_S)
        except OSError:
            assert time.monotonic() < limit
            time.sleep(0.01)


@settings(deadline=None)
@given(
    ours=st.binary(min_size=1),
    theirs=st.none() | st.binary(min_size=1),
    name=st.text(max_size=99),
    noise=st.none() | st.binary(max_size=200),
)
def test_only_those_who_know_the_key_get_in(
    ours: bytes, theirs: bytes | None, name: str, noise: bytes | None
) -> None:
    """theirs: their key; None = the same. noise: what they send instead of knowing what to say."""
    engine, host = socket.socketpair()
    found: list[object] = []

    def let_in() -> None:
        with engine:
            engine.settimeout(SOON_S)
            try:
                found.append(admit(engine, ours))
            except (Stranger, OSError) as error:
                found.append(error)

    greeter = threading.Thread(target=let_in)
    greeter.start()
    host.settimeout(SOON_S)
    knows = noise is None and theirs in (None, ours)
    with host:
        if noise is not None:
            host.sendall(noise)
        elif knows:
            introduce(host, ours, {"name": name})
        else:
            with pytest.raises(Stranger):
                introduce(host, theirs or ours, {"name": name})
    greeter.join()
    assert (found == [{"name": name}]) == knows


@given(key=st.binary(min_size=1), answer=st.binary(min_size=200, max_size=200))
def test_an_engine_must_know_the_key_too(key: bytes, answer: bytes) -> None:
    engine, host = socket.socketpair()
    with engine, host:
        engine.sendall(b"pegboard ranks 1" + answer)
        with pytest.raises(Stranger, match="it does not know the key"):
            introduce(host, key, {})
    engine, host = socket.socketpair()
    with engine, host:
        engine.sendall(b"-" + answer)
        with pytest.raises(Stranger, match="does not greet"):
            introduce(host, key, {})
