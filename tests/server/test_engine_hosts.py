"""One server whose engines are on two hosts, which are two groups of processes here."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_process import HTTP, Server, cli, free_port, wait_until
from test_data_parallel import answers, by_engine, complete, control
from test_expert_servers import LONG, TWO, mixture, tokens
from test_lifecycle import LONG as LONG_TEXT
from test_lifecycle import events_of, running_stream

Start = Callable[..., tuple[Server, Server]]

__all__ = ["mixture"]  # a fixture


@pytest.fixture
def start(
    smollm2_gguf: Path, tmp_path: Path, probe: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Start a server with one of two engines, and the host of the other one."""
    monkeypatch.setenv("PEGBOARD_CLUSTER_KEY", "a secret")
    started: list[Server] = []

    def start(*flags: str, model: Path = smollm2_gguf, first: int = 1) -> tuple[Server, Server]:
        sizes = ("-dp", "2", "-dpl", "1", "-dpa", "127.0.0.1", "-dpp", str(free_port()))
        for name, more in (
            ("server", ()),
            ("host", ("--headless", "-dpr", str(first), "-dpl", "1")),
        ):
            folder = tmp_path / name
            folder.mkdir()
            flags_here = (*sizes, "--num-threads", "1", *flags, *more)
            started.append(Server(model, folder, *flags_here, probe=probe))
        server, host = started
        return server.wait_until_ready(), host

    yield start
    for running in started:
        running.stop()


def check_end(server: Server, host: Server, code: int) -> None:
    """Both end with this exit code, and nothing of them is left."""
    assert (server.wait(), host.wait()) == (code, code)
    server.check_nothing_left()
    host.check_nothing_left()
    assert "Traceback" not in server.log.read_text() + host.log.read_text()


def test_engines_on_two_hosts(server: Server, start: Start) -> None:
    two, host = start()
    assert answers(two) == answers(server)
    generated = by_engine(two, "generation_tokens_total")
    assert generated.keys() == {"0", "1"} and all(generated.values())
    with running_stream(two), running_stream(two):
        wait_until(
            lambda: list(by_engine(two, "num_requests_running").values()) == [1, 1],
            "each engine has a request",
        )
    two.wait_until_idle()
    control(two, "pause")
    assert control(two, "is_paused") is True
    control(two, "resume")
    two.process.terminate()
    check_end(two, host, 0)


@pytest.mark.slow
def test_a_stall_on_another_host_is_seen(start: Start) -> None:
    """Two API processes see it too."""
    two, host = start("--api-server-count", "2", "--engine-stall-s", "2")
    assert complete(two, "One", rank=1)["choices"]
    (engine,) = host.engine_pids()
    os.kill(engine, signal.SIGSTOP)
    wait_until(lambda: HTTP.get(f"{two.url}/health").status_code == 503, "the stall is noticed")
    os.kill(engine, signal.SIGCONT)
    wait_until(lambda: HTTP.get(f"{two.url}/health").status_code == 200, "it answers again")
    os.kill(engine, signal.SIGKILL)
    check_end(two, host, 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("engine", signal.SIGKILL),
        pytest.param("host", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("host", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_clients_hear_of_a_death_on_another_host(
    start: Start, victim: str, number: signal.Signals
) -> None:
    """A host that is stopped does not answer, as one that has vanished."""
    two, host = start()
    dies = host.engine_pids()[0] if victim == "engine" else host.process.pid
    endless = {**LONG_TEXT, "max_tokens": 900}
    with running_stream(two, endless, 1) as lines, running_stream(two, endless, 1) as others:
        os.kill(dies, number)
        for events in (events_of(lines), events_of(others)):
            message = json.loads(events[-2])["error"]["message"]
            assert "engine 1: " in message
            assert ("SIGKILL" in message) is (victim == "engine")
    assert two.wait() == 1
    if number == signal.SIGSTOP:
        os.kill(dies, signal.SIGCONT)
    if victim == "engine" or number == signal.SIGSTOP:
        check_end(two, host, 1)
        return
    assert host.wait() == -signal.SIGKILL
    two.check_nothing_left()
    host.check_nothing_left()


@pytest.mark.slow
def test_a_host_ends_with_its_server(start: Start) -> None:
    two, host = start()
    with running_stream(two):
        os.kill(two.process.pid, signal.SIGKILL)
    assert two.wait() == -signal.SIGKILL and host.wait() == 1
    host.check_nothing_left()
    assert "the server has ended" in host.log.read_text()


@pytest.mark.slow
def test_a_host_that_is_told_to_end(start: Start) -> None:
    two, host = start()
    with running_stream(two, LONG_TEXT) as lines:
        host.process.terminate()
        assert "engine 1: " in json.loads(events_of(lines)[-2])["error"]["message"]
    check_end(two, host, 1)


@pytest.mark.slow
def test_experts_of_engines_on_two_hosts(
    start: Start, mixture: Path, tmp_path: Path, probe: Path
) -> None:
    folder = tmp_path / "alone"
    folder.mkdir()
    with Server(mixture, folder, *TWO, probe=probe) as one_host:
        expected = tokens(one_host.wait_until_ready())
    flags = [flag for flag in TWO if flag not in ("-dp", "2")]
    two, host = start(*flags, model=mixture)
    assert tokens(two) == tokens(two, rank=1) == expected
    two.wait_until_idle()
    with running_stream(two, LONG), running_stream(two, LONG):
        os.kill(host.engine_pids()[0], signal.SIGKILL)
        check_end(two, host, 1)


def test_a_server_without_an_engine_of_its_own(server: Server, start: Start) -> None:
    alone, host = start("-dp", "1", "-dpl", "0", first=0)
    assert not alone.engine_pids() and len(host.engine_pids()) == 1
    assert answers(alone) == answers(server)
    alone.process.terminate()
    check_end(alone, host, 0)


def test_what_a_host_must_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEGBOARD_CLUSTER_KEY", raising=False)
    done = cli("serve", "nowhere", "-dp", "2", "--headless")
    assert done.returncode == 2 and "data_parallel_start_rank" in done.stderr
    flags = ("-dp", "2", "-dpl", "1", "-dpa", "127.0.0.1", "-dpp", str(free_port()))
    for more in ((), ("--headless", "-dpr", "1")):
        done = cli("serve", "nowhere", *flags, *more)
        assert done.returncode == 2 and "PEGBOARD_CLUSTER_KEY" in done.stderr
