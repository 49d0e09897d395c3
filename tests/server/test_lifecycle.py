"""How a server ends: on request, when its engine is killed, and when it is killed itself. Nothing
may remain."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import MODEL, SIZES, Server, cli, processes, wait_until

LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Once upon a time",
    "max_tokens": 900,
    "ignore_eos": True,
    "stream": True,
}

StartServer = Callable[..., Server]


@contextmanager
def running_stream(
    server: Server, body: dict[str, Any] = LONG, rank: int | None = None
) -> Iterator[Iterator[str]]:
    """Yields the lines of a stream that has begun. rank: the engine that computes it."""
    url = f"{server.url}/v1/completions"
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    with (
        httpx.Client(timeout=120) as http,
        http.stream("POST", url, json=body, headers=headers) as response,
    ):
        assert response.status_code == 200
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
        yield lines


def events_of(lines: Iterator[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line]


def test_killed_engine(start_server: StartServer) -> None:
    """Streams end with an error event, waiting clients get an error, and /health reports the
    failure. The server then exits at once with an error, because there is nothing to wait for."""
    server = start_server("--shutdown-timeout-s", "600")
    engine = server.engine_pid()
    with (
        running_stream(server) as lines,
        running_stream(server, {**LONG, "n": 3}) as others,
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(
            httpx.post, f"{server.url}/v1/completions", json={**LONG, "stream": False}, timeout=120
        )
        wait_until(lambda: server.stats()["num_requests_running"] == 5, "all requests run")
        os.kill(engine, signal.SIGKILL)
        for events in (events_of(lines), events_of(others)):
            error = json.loads(events[-2])["error"]
            assert events[-1] == "[DONE]" and error["code"] == 500 and "SIGKILL" in error["message"]
        answer = waiting.result()
        assert answer.status_code == 500 and "SIGKILL" in answer.json()["error"]["message"]
        assert server.status("/health") in (503, None)
        wait_until(lambda: server.status("/health") is None, "the server takes no more connections")
    assert server.wait() == 1
    server.check_nothing_left()
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("option", "number"),
    [
        ("--tensor-parallel-size", signal.SIGKILL),
        pytest.param("--tensor-parallel-size", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("--pipeline-parallel-size", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_killed_rank(start_server: StartServer, option: str, number: signal.Signals) -> None:
    """One of two ranks is killed, or hangs. Clients are told which one, and the server exits."""
    server = start_server(option, "2")
    children = Path(f"/proc/{server.engine_pid()}/task/{server.engine_pid()}/children")
    ranks = [int(pid) for pid in children.read_text().split()]
    assert len(ranks) == 2
    reason = "signal SIGKILL" if number == signal.SIGKILL else "is stopped"
    with running_stream(server) as lines:
        os.kill(ranks[1], number)
        error = json.loads(events_of(lines)[-2])["error"]
        assert error["code"] == 500
        assert "worker 1 died" in error["message"] and reason in error["message"]
    assert server.wait() == 1
    server.check_nothing_left()
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_while_streaming(start_server: StartServer, number: signal.Signals) -> None:
    """Short requests finish, long ones end with an error event after the timeout, and the exit code
    is 0. The signal is sent to the whole process group, including the engine, as a terminal and
    service managers do."""
    server = start_server("--shutdown-timeout-s", "4")
    with (
        running_stream(server, {**LONG, "n": 16}) as long,
        running_stream(server, {**LONG, "max_tokens": 6}) as short,
    ):
        server.signal_group(number)
        events = events_of(short)
        assert (
            events[-1] == "[DONE]"
            and json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        )
        *_, error, end = events_of(long)
        assert end == "[DONE]" and "the server is stopping" in json.loads(error)["error"]["message"]
    assert server.wait() == 0
    server.check_nothing_left()
    assert "Traceback" not in server.log.read_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_when_idle(start_server: StartServer, number: signal.Signals) -> None:
    server = start_server()
    server.signal_group(number)
    assert server.wait() == 0
    server.check_nothing_left()
    assert "Traceback" not in server.log.read_text()


def test_killed_server_takes_its_engine_along(start_server: StartServer) -> None:
    server = start_server()
    engine = server.engine_pid()
    with running_stream(server):
        server.process.kill()
        assert server.wait() == -signal.SIGKILL
    wait_until(lambda: engine not in {pid for pid, _, _ in processes()}, "the engine has ended")
    server.check_nothing_left()


STAGES: dict[str, Callable[[Server], object]] = {
    "folder made": lambda server: list(server.temp.iterdir()),
    "child spawned": lambda server: [
        1 for _, parent, _ in processes() if parent == server.process.pid
    ],
    "engine listening": lambda server: list(server.temp.glob("*/engine")),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_while_starting(
    smollm2_gguf: Any, tmp_path: Any, number: signal.Signals, stage: str
) -> None:
    with Server(smollm2_gguf, tmp_path) as server:
        wait_until(lambda: STAGES[stage](server), stage)
        server.signal_group(number)
        # 0 if the server had already started; a shell shows an end by the signal as 128 + number
        assert server.wait() in (128 + number, -number, 0)
        server.check_nothing_left()
    assert "Traceback" not in server.log.read_text()


def test_taken_port(server: Server, smollm2_gguf: Any, tmp_path: Any) -> None:
    """The second server prints one clear line. The server that has the port continues."""
    ended = cli(
        "serve", str(smollm2_gguf), *SIZES, "--port", str(server.port), TMPDIR=str(tmp_path)
    )
    assert (
        ended.returncode == 1
        and f"port {server.port} on 127.0.0.1 is already in use" in ended.stderr
    )
    assert "Traceback" not in ended.stderr and list(tmp_path.iterdir()) == []
    assert server.status("/health") == 200


def test_start_up_prints_five_lines(start_server: StartServer) -> None:
    """The server prints the model, the device, the KV cache, the address, and a hint for when it is
    slow. A flag prints the table of choices."""
    server = start_server()
    wait_until(lambda: server.log.read_text().count("\n") >= 5, "everything is printed")
    model, device, cache, address, advice = server.log.read_text().splitlines()
    assert (
        ": LlamaForCausalLM, loaded in " in model
        and "device cpu" in device
        and "KV cache: " in cache
    )
    assert address.endswith(f" on {server.url}") and "pegboard plugins why --model " in advice
    assert server.stop() == 0 and len(server.log.read_text().splitlines()) == 5


def test_verbose_start_up_tells_every_choice(start_server: StartServer) -> None:
    shown = start_server("-v").log.read_text()
    for choice in (
        "weight_loader →",
        "model LlamaForCausalLM →",
        "platform →",
        "attention ",
        "api →",
    ):
        assert choice in shown, choice
