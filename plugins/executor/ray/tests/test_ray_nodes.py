"""Ranks on two nodes, what crosses between them, and what ends them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'ray>=2.40'", allow_module_level=True)

import ray
from pegboard_executor_ray.cluster import Cluster
from pegboard_executor_ray.executor import RayExecutor
from pegboard_executor_ray.node import needs_of
from pegboard_executor_ray.options import RayOptions
from pegboard_executor_ray.rank import show_gpus

from pegboard.data.batch import TransferReport
from pegboard.errors import ConfigError, EngineDeadError, PegboardError, PluginBroken
from pegboard.interfaces.executor import ExecutorSetup, Place
from pegboard.plugins.hosts import check_same_plugins
from pegboard_testing.contract_executor import RecordingWorker, is_running, make_batch
from pegboard_testing.recording_worker import LASTS
from pegboard_testing.tiny_engine import tokens

sys.path.insert(0, str(Path(__file__).parent))  # for this process and those of the ranks

import ray_workers

SPREAD = RayOptions(placement="STRICT_SPREAD")
"""Every rank is on a node of its own."""

DEATH_S = 10.0
"""Seconds in which the death of a node must be noticed. It takes less, but machines may be slow."""

OWN_RAY = """
import json, os, sys
from pathlib import Path
from pegboard_executor_ray import cluster
from pegboard_testing.tiny_engine import tokens
connect = cluster.Cluster.connect
def noting(self, num_cpus):
    connect(self, num_cpus)
    seen.append([len(cluster.ray.nodes()), self._folder and self._folder.path])
cluster.Cluster.connect = noting
seen = []
answers = tokens(Path(sys.argv[1]), **json.loads(sys.argv[2]))
print(json.dumps([answers, seen, cluster.ray.is_initialized()]))
"""

SETTINGS: dict[str, Any] = {"num_threads": 1, "distributed_executor_backend": "ray"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The greedy tokens of one rank in this process."""
    return tokens(tmp_path_factory.mktemp("one"), num_threads=1)


@contextmanager
def running(
    worker: type[RecordingWorker], ranks: int = 2, options: RayOptions | None = None, **setup: Any
) -> Iterator[RayExecutor]:
    executor = RayExecutor(options, ExecutorSetup(worker, ranks, **setup))
    executor.start()
    try:
        yield executor
    finally:
        executor.stop()


# --- two nodes ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_nodes_give_the_tokens_of_one_rank(
    cluster: Any, tmp_path: Path, expected: list[list[int]]
) -> None:
    options = {"executor.ray": {"placement": "STRICT_SPREAD"}}
    settings = {**SETTINGS, "tensor_parallel_size": 2, "plugin_options": options}
    assert tokens(tmp_path, **settings) == expected
    assert ray.is_initialized(), "the caller's Ray goes on"


def test_ranks_of_two_nodes_meet_at_a_port(cluster: Any) -> None:
    with running(RecordingWorker, options=SPREAD) as executor:
        first, second = executor.call("place")
        assert isinstance(first, Place) and isinstance(second, Place)
        for place in (first, second):
            assert (place.local_rank, place.local_ranks) == (0, 1)
            assert place.address.startswith("tcp://")
        here = ray.get_runtime_context().get_node_id()
        assert executor._seats[0].node == here, "the first rank is on the node of the engine"
        assert executor._seats[1].node != here


def test_ranks_of_a_node_are_consecutive(cluster: Any) -> None:
    """Five ranks do not fit on one node of four CPUs."""
    with running(RecordingWorker, 5) as executor:
        nodes = [seat.node for seat in executor._seats]
        assert len(set(nodes)) == 2 and nodes == sorted(nodes, key=nodes.index)
        places = [place for place in executor.call("place") if isinstance(place, Place)]
        assert [place.local_rank for place in places] == [
            nodes[:rank].count(node) for rank, node in enumerate(nodes)
        ]
        assert [place.local_ranks for place in places] == [nodes.count(node) for node in nodes]


@pytest.mark.slow
def test_a_node_that_is_killed(cluster: Any) -> None:
    node = cluster.add_node(num_cpus=4)
    with running(RecordingWorker, 3, SPREAD) as executor:
        nodes = [seat.node for seat in executor._seats]
        rank = nodes.index(node.node_id)
        pids = [int(str(pid)) for pid in executor.call("pid")]
        step = executor.submit(make_batch(LASTS))
        cluster.remove_node(node, allow_graceful=False)
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=f"^worker {rank} died: "):
            step.result()
        assert time.monotonic() - began < DEATH_S
    assert not any(is_running(pid) for pid in pids)


def test_a_cluster_without_room(cluster: Any) -> None:
    options = RayOptions(placement_timeout_s=0.2)
    executor = RayExecutor(options, ExecutorSetup(RecordingWorker, 2, num_threads=5))
    with pytest.raises(ConfigError) as refused:
        executor.start()
    message = str(refused.value)
    assert "no room for 2 ranks with 5 CPU and 0 GPU each (placement PACK) after 0.2 s" in message
    assert "its nodes have 4 CPU and 0 GPU; 4 CPU and 0 GPU" in message
    executor.stop()


def test_gpus_are_needed_where_the_platform_computes_with_them() -> None:
    for platform, num_gpus in (("cpu", 0), ("cuda", 1), ("rocm", 1)):
        assert needs_of(3, platform) == {"CPU": 3, "GPU": num_gpus}


def test_ranks_see_the_gpus_of_all_ranks_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """On nodes with AMD GPUs, Ray has shown each rank only its own."""
    nvidia, amd = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
    monkeypatch.setenv(nvidia, "3")
    monkeypatch.delenv(amd, raising=False)
    show_gpus("3,1")
    assert os.environ[nvidia] == "3,1" and amd not in os.environ
    monkeypatch.setenv(amd, "2")
    show_gpus("")
    assert os.environ[amd] == "2"
    show_gpus("2,0")
    assert os.environ[amd] == "2,0"


def test_other_plugins_on_a_node_are_refused(cluster: Any) -> None:
    check = partial(check_same_plugins, {"pegboard-executor-local": "0.0.1"})
    with (
        pytest.raises(PluginBroken, match=r"pegboard-executor-local \(here .*, there 0\.0\.1\)"),
        running(RecordingWorker, options=SPREAD, check_plugins=check),
    ):
        pass


# --- where Ray comes from -------------------------------------------------------------------------


def in_a_process(folder: Path, settings: dict[str, Any], **environment: str) -> list[Any]:
    """Return what OWN_RAY prints: the tokens, the number of nodes with the folder of Ray, and
    whether the process is still connected at the end."""
    folder.mkdir()
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run(
        [sys.executable, "-c", OWN_RAY, str(folder), json.dumps(settings)],
        stdout=subprocess.PIPE,
        env={**inherited, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    return list(json.loads(ended.stdout.decode().splitlines()[-1]))


@pytest.mark.slow
def test_a_ray_of_its_own_ends_with_the_engine(tmp_path: Path, expected: list[list[int]]) -> None:
    settings = {**SETTINGS, "pipeline_parallel_size": 2}
    answers, ((num_nodes, folder),), is_connected = in_a_process(tmp_path / "own", settings)
    assert answers == expected and num_nodes == 1 and not is_connected
    assert not Path(folder).exists()
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if folder in text(path)]
    assert not left


def text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


@pytest.mark.slow
def test_the_environment_names_the_cluster(
    cluster: Any, tmp_path: Path, expected: list[list[int]]
) -> None:
    answers, ((num_nodes, folder),), _ = in_a_process(
        tmp_path / "theirs", SETTINGS, RAY_ADDRESS=cluster.address
    )
    assert answers == expected and num_nodes >= 2 and folder is None


def test_an_address_where_nobody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**arguments: Any) -> None:
        raise ConnectionError(f"nobody is at {arguments['address']}")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match=r"no connection to Ray at 192\.0\.2\.9:1: nobody is at"):
        Cluster(RayOptions(address="192.0.2.9:1")).connect(1)


# --- what crosses ---------------------------------------------------------------------------------


def test_errors_and_values_cross(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with running(ray_workers.Outspoken, options=SPREAD) as executor:
        with pytest.raises(PluginBroken, match="it is broken") as broken:
            executor.call("plugin")
        assert broken.value.plugin == "sampler:x"
        with pytest.raises(PegboardError, match="^OddError: an odd error$"):
            executor.call("odd")
        with pytest.raises(PegboardError, match="answer of a worker cannot be sent.*a function"):
            executor.call("function")
        assert executor.call("memory") == [("memory", 0), ("memory", 1)]
        assert executor.call("threads") == [None, None], "a share of the cores, not of the bundle"
        with pytest.raises(EngineDeadError, match="^worker 1 died: its process or node has ended"):
            executor.call("leave")


def test_large_batches_cross(cluster: Any) -> None:
    with running(ray_workers.Large, options=SPREAD) as executor:
        steps = []
        for number in range(1, 4):
            batch = make_batch(number)
            batch.rows = np.full(1_000_000, number, np.int32)
            steps.append(executor.submit(batch))
        for number, step in enumerate(steps, 1):
            assert step.result().rows.sum() == number * 1_000_000


def test_a_transfer_has_ended_when_all_ranks_have_reported_it(cluster: Any) -> None:
    with running(ray_workers.Transferring) as executor:
        for number in (1, 2):
            output = executor.submit(make_batch(number)).result()
            assert output.transfers == {"c": TransferReport([], [], {})}
        saved: list[str] = []
        for number in range(3, 1000):
            saved += executor.submit(make_batch(number)).result().transfers["c"].saved
            if saved:
                break
            time.sleep(0.005)  # the other rank reports when it gets to it
        assert saved == ["a"]
