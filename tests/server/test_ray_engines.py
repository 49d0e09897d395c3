"""A server whose engines Ray starts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from server_process import Server, free_port, processes, wait_until
from test_data_parallel import answers, by_engine
from test_elastic import ELASTIC, scale
from test_expert_servers import START, mixture, tokens
from test_expert_servers import start as start_mixture
from test_lifecycle import events_of, running_stream

pytest.importorskip("ray")

StartServer = Callable[..., Server]

__all__ = ["mixture", "start_mixture"]  # fixtures


def ray_flags(port: int) -> tuple[str, ...]:
    return (*ELASTIC, "--data-parallel-backend", "ray", "-dpp", str(port))


def hosts(port: int) -> list[int]:
    """The processes that run engines for the server with this port."""
    flag = f"--data-parallel-rpc-port={port}"
    return [pid for pid, _, _ in processes() if flag in command(pid)]


def command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


@pytest.mark.slow
def test_ray_starts_engines(server: Server, start_server: StartServer) -> None:
    port = free_port()
    expected = answers(server)
    two = start_server("-dp", "2", "-dpl", "1", "--num-threads", "1", *ray_flags(port))
    assert answers(two) == expected
    assert all(by_engine(two, "generation_tokens_total").values())
    assert scale(two, new_data_parallel_size=3)[0] == 200
    assert len(hosts(port)) == 2 and len(two.engine_pids()) == 1
    assert answers(two) == expected
    assert scale(two, new_data_parallel_size=2)[0] == 200
    wait_until(lambda: len(hosts(port)) == 1, "the engine's host has ended")
    (host,) = hosts(port)
    with running_stream(two) as lines:
        os.kill(host, signal.SIGKILL)
        assert "engine 1: its host" in json.loads(events_of(lines)[-2])["error"]["message"]
    assert two.wait() == 1
    wait_until(lambda: not hosts(port), "no host is left")


@pytest.mark.slow
def test_ray_has_no_room(smollm2_gguf: Path, tmp_path: Path) -> None:
    """A Ray of our own has the CPUs of one engine."""
    port = free_port()
    flags = ("-dp", "2", "--num-threads", "400", "--executor.ray.placement_timeout_s", "0.5")
    crowded = Server(smollm2_gguf, tmp_path, *flags, *ray_flags(port))
    assert crowded.wait() == 2
    assert "Ray has no room for an engine with 400 CPU" in crowded.log.read_text()
    assert not hosts(port), "the engine that had room has ended, although it was still starting"
    crowded.check_nothing_left()


@pytest.mark.slow
def test_ray_starts_engines_with_shared_out_experts(start_mixture: StartServer) -> None:
    port = free_port()
    elastic = start_mixture(*START, "--enable-expert-parallel", *ray_flags(port))
    expected = tokens(elastic)
    for size in (2, 1):
        answer = scale(elastic, new_data_parallel_size=size)
        assert answer[0] == 200, answer
        assert tokens(elastic) == tokens(elastic, rank=size - 1) == expected
        assert not elastic.engine_pids()
    assert elastic.stop() == 0
    wait_until(lambda: not hosts(port), "no host is left")
