"""Several engines behind one server: the same answers as one, shared work, and one end for all."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import HTTP, MODEL, Server, cli, wait_until
from test_lifecycle import LONG, events_of, running_stream

StartServer = Callable[..., Server]

PROMPTS = [f"{number} is a number, and the next one is" for number in range(8)]
TWO = ("--data-parallel-size", "2", "--num-threads", "1")


def complete(server: Server, prompt: str, rank: int | None = None, **more: Any) -> dict[str, Any]:
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, **more}
    return dict(HTTP.post(f"{server.url}/v1/completions", json=body, headers=headers).json())


def answers(server: Server) -> list[str]:
    """What the server answers to all prompts at the same time."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        bodies = list(pool.map(lambda prompt: complete(server, prompt), PROMPTS))
    return [body["choices"][0]["text"] for body in bodies]


def by_engine(server: Server, name: str) -> dict[str, float]:
    """Engine → a number of /metrics."""
    text = HTTP.get(f"{server.url}/metrics").raise_for_status().text
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"vllm:{name}"
    }


def control(server: Server, action: str) -> Any:
    return HTTP.get(f"{server.url}/probe/{action}").raise_for_status().json()


@pytest.mark.slow
def test_two_engines(server: Server, start_server: StartServer) -> None:
    two = start_server(*TWO)
    assert answers(two) == answers(server)
    tokens = by_engine(two, "generation_tokens_total")
    assert tokens.keys() == {"0", "1"} and all(tokens.values())
    assert sum(tokens.values()) == 12 * len(PROMPTS)

    # a prefix is reused where it was computed
    long = "A shared prompt that is long enough to matter. " * 60
    before = by_engine(two, "prefix_cache_hits_total")
    complete(two, long, rank=1)
    for number in range(3):
        complete(two, f"{long}{number}")
    after = by_engine(two, "prefix_cache_hits_total")
    assert after["0"] == before["0"] and after["1"] > before["1"] + 3 * 512

    # streams run on both; leaving them ends them
    with running_stream(two), running_stream(two, {**LONG, "n": 2}):
        wait_until(
            lambda: (
                two.stats()["num_requests_running"] == 3
                and sorted(by_engine(two, "num_requests_running").values()) == [1, 2]
            ),
            "both engines have a request, and their numbers are added up",
        )
    two.wait_until_idle()

    # actions reach both
    control(two, "pause")
    assert control(two, "is_paused") is True
    control(two, "resume")
    assert control(two, "is_paused") is False
    assert control(two, "reset_prefix_cache") is True

    refused = complete(two, "x", rank=2)["error"]
    assert refused["code"] == 400 and "engines are 0 to 1" in refused["message"]
    answer = HTTP.post(
        f"{two.url}/v1/completions", json=LONG, headers={"X-data-parallel-rank": "first"}
    )
    assert answer.status_code == 400 and "must be the number of an engine" in answer.text
    assert two.stop() == 0
    two.check_nothing_left()


@pytest.mark.slow
def test_one_of_two_engines_is_killed(start_server: StartServer) -> None:
    """All clients are told, the other engine is ended, and the server exits with an error."""
    server = start_server(*TWO)
    pids = server.engine_pids()
    with running_stream(server) as lines, running_stream(server) as others:
        os.kill(pids[1], signal.SIGKILL)
        for events in (events_of(lines), events_of(others)):
            error = json.loads(events[-2])["error"]
            assert error["code"] == 500 and "SIGKILL" in error["message"]
            assert "engine 1: " in error["message"]
    assert server.wait() == 1
    server.check_nothing_left()
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
@pytest.mark.slow
def test_two_engines_of_two_ranks(server: Server, start_server: StartServer) -> None:
    """Each engine has its own ranks. A rank that is killed ends everything."""
    four = start_server(*TWO, "--tensor-parallel-size", "2")
    ranks = [
        int(pid)
        for engine in four.engine_pids()
        for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    ]
    assert len(ranks) == 4
    assert all(text for text in answers(four))
    assert all(by_engine(four, "generation_tokens_total").values())
    with running_stream(four, {**LONG, "n": 4}) as lines:
        os.kill(ranks[1], signal.SIGKILL)
        error = json.loads(events_of(lines)[-2])["error"]
        assert "engine 0: " in error["message"] and "worker 1 died" in error["message"]
    assert four.wait() == 1
    four.check_nothing_left()


def test_two_engines_behind_two_api_processes(server: Server, start_server: StartServer) -> None:
    """Requests of both processes are shared out among both engines, wherever they are accepted."""
    two = start_server(*TWO, "--api-server-count", "2", "--engine-stall-s", "2")
    pids = two.engine_pids()
    assert answers(two) == answers(server)
    for rank in (0, 1):
        before = by_engine(two, "generation_tokens_total")
        for _ in range(4):  # new connections, which both processes accept
            complete(two, "One", rank=rank)
        wait_until(
            lambda rank=rank, before=before: (
                by_engine(two, "generation_tokens_total")
                == before | {str(rank): before[str(rank)] + 48}
            ),
            "every process shows the tokens of the engine",
        )
    assert complete(two, "One", rank=2)["error"]["code"] == 400
    with running_stream(two), running_stream(two):
        wait_until(
            lambda: list(by_engine(two, "num_requests_running").values()) == [1, 1],
            "each engine has a request",
        )
    two.wait_until_idle()
    os.kill(pids[1], signal.SIGSTOP)
    wait_until(lambda: HTTP.get(f"{two.url}/health").status_code == 503, "the stall is noticed")
    os.kill(pids[1], signal.SIGCONT)
    wait_until(lambda: HTTP.get(f"{two.url}/health").status_code == 200, "it answers again")
    os.kill(pids[1], signal.SIGKILL)
    assert two.wait() == 1
    two.check_nothing_left()


def test_external_balancing(start_server: StartServer) -> None:
    """A server whose only engine is number 1 of 2."""
    server = start_server(
        "--data-parallel-size", "2", "--data-parallel-rank", "1", "--data-parallel-external-lb"
    )
    assert complete(server, "One", rank=1)["choices"]
    assert complete(server, "One", rank=0)["error"]["code"] == 400
    assert by_engine(server, "generation_tokens_total") == {"1": 12}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-dp", "2", "-dpl", "1"), "data_parallel_address"),
        (("-dp", "2", "-dpe"), "data_parallel_rank"),
        (("-dp", "2", "-dph"), "data_parallel_size_local"),
        (("-dp", "2", "-dpr", "2", "-dpl", "1"), "there is no engine 2"),
        (("-dp", "2", "-dpb", "ray", "-dpn", "1"), "a server with all engines"),
        (("-dp", "2", "--data-parallel-launcher", "uni"), "does not start engines"),
        (("-dp", "2", "--data-parallel-launcher", "slurm"), "slurm"),
    ],
)
def test_what_needs_several_hosts_is_refused(flags: tuple[str, ...], words: str) -> None:
    done = cli("serve", "nowhere", *flags)
    assert done.returncode != 0 and words in done.stderr, done.stderr
