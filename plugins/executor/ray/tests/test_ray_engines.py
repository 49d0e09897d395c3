"""Commands of engines on the nodes of Ray."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from pegboard_executor_ray.engines import RayLauncher
from pegboard_executor_ray.options import RayOptions

from pegboard.interfaces.executor import LaunchSetup

SOON_S = 60.0

Ends = queue.SimpleQueue[tuple[str, str]]


def launcher(*, threads: int = 1, timeout_s: float = SOON_S) -> RayLauncher:
    setup = LaunchSetup(
        num_ranks=2,
        num_threads=threads,
        platform="cpu",
        variables={"PEGBOARD_LOG_LEVEL": "ERROR"},
    )
    launcher = RayLauncher(RayOptions(placement_timeout_s=timeout_s), setup)
    assert launcher.connect()
    return launcher


@pytest.fixture
def ends(cluster: Any) -> Iterator[Ends]:
    """What the launcher says. All CPUs are free afterwards."""
    yield queue.SimpleQueue()
    wait_for_cpus(8)


def wait_for_cpus(count: int) -> None:
    limit = time.monotonic() + SOON_S
    while ray.available_resources().get("CPU", 0) != count:
        assert time.monotonic() < limit, ray.available_resources()
        time.sleep(0.05)


def test_a_command_that_ends_gives_its_cpus_back(ends: Ends) -> None:
    running = launcher()
    for words in (["--version"], ["no-such-command"]):
        running.launch(words, lambda reason, name=words[0]: ends.put((name, reason)))
    outcomes = dict(ends.get(timeout=SOON_S) for _ in range(2))
    assert "its process on a node of Ray has ended with code 0" in outcomes["--version"]
    assert "code 2" in outcomes["no-such-command"]
    wait_for_cpus(8)
    running.stop()
    running.stop()


def test_an_engine_without_room(ends: Ends) -> None:
    crowded = launcher(threads=40, timeout_s=0.2)
    crowded.launch(["--version"], lambda reason: ends.put(("--version", reason)))
    _, reason = ends.get(timeout=SOON_S)
    assert "Ray has no room for an engine with 80 CPU and 0 GPU each" in reason
    crowded.stop()


def test_a_launcher_that_stops_leaves_no_actor(ends: Ends) -> None:
    running = launcher()
    running.launch(
        [
            "serve",
            "--headless",
            "--data-parallel-size=2",
            "--data-parallel-size-local=1",
            "--data-parallel-start-rank=1",
            "--data-parallel-address=127.0.0.1",
            "--data-parallel-rpc-port=9",
        ],
        lambda reason: None,
    )
    wait_for_cpus(6)
    running.stop()
