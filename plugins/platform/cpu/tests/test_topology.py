"""Cores and memory nodes are read from what Linux lists; memory is spread over several nodes."""

from __future__ import annotations

import ctypes
import platform as machine
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pegboard_platform_cpu import platform
from pegboard_platform_cpu.platform import CPUPlatform
from pegboard_platform_cpu.topology import (
    SYSTEM,
    interleave,
    memory_nodes,
    num_cores,
)

from pegboard.env import usable_cpus
from pegboard.interfaces.platform import PlatformSetup


def write(root: Path, name: str, content: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def listed(numbers: list[int], in_spans: bool) -> str:
    """Return numbers as Linux lists them: "0-3,8"."""
    is_span = in_spans and len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if is_span else ",".join(map(str, numbers))


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.booleans(), st.data())
def test_cores_and_nodes(nodes: int, cores: int, threads: int, is_near: bool, data: st.DataObject):
    """Hardware threads of a core may have numbers that follow each other, or the second ones come
    after the first ones of all cores."""
    total = nodes * cores * threads
    of_core = {cpu: cpu // threads if is_near else cpu % (nodes * cores) for cpu in range(total)}
    of_node = {cpu: core // cores for cpu, core in of_core.items()}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for cpu, core in of_core.items():
            siblings = [other for other in of_core if of_core[other] == core]
            name = f"cpu/cpu{cpu}/topology/thread_siblings_list"
            write(root, name, listed(siblings, is_near) + "\n")
        for node in range(nodes):
            own = [cpu for cpu in of_node if of_node[cpu] == node]
            write(root, f"node/node{node}/cpulist", listed(own, is_near) + "\n")
        write(root, "node/node9/cpulist", "\n")  # memory without CPUs
        some = data.draw(st.sets(st.sampled_from(range(total)), min_size=1))
        assert num_cores(some, root) == len({of_core[cpu] for cpu in some})
        assert memory_nodes(some, root) == sorted({of_node[cpu] for cpu in some})


def test_without_lists_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert num_cores([0, 1, 5], tmp_path) == 3 and memory_nodes([0, 1], tmp_path) == []
    write(tmp_path, "cpu/cpu0/topology/thread_siblings_list", "zero\n")
    assert num_cores([0, 1], tmp_path) == 2


def test_there_is_a_thread_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(platform, "num_cores", lambda cpus: 3)
    monkeypatch.setattr(platform, "cpu_quota", lambda: None)
    assert CPUPlatform(None, PlatformSetup()).num_threads == 3
    monkeypatch.setattr(platform, "cpu_quota", lambda: 2.0)
    assert CPUPlatform(None, PlatformSetup()).num_threads == 2


@pytest.mark.skipif(
    machine.machine() != "x86_64" or not (SYSTEM / "node/node0").exists(),
    reason="needs the nodes of x86_64 Linux",
)
def test_the_policy_is_that_of_the_thread() -> None:
    """get_mempolicy(2) says what was set. Other threads are left alone."""
    policies = []

    def policy() -> int:
        found = ctypes.c_int(-1)
        assert ctypes.CDLL(None).syscall(239, ctypes.byref(found), None, 0, None, 0) == 0
        return found.value

    def spread() -> None:
        if interleave(memory_nodes(usable_cpus())):
            policies.append(policy())

    before = policy()
    thread = threading.Thread(target=spread)
    thread.start()
    thread.join()
    if not policies:
        pytest.skip("this container may not set policies")
    assert policies == [3] and policy() == before


@pytest.mark.parametrize(
    ("nodes", "is_allowed", "words"),
    [
        ([0], True, ""),
        ([0, 1], True, "memory is taken from the nodes [0, 1] in turn"),
        ([0, 1], False, "does not let it spread its memory"),
    ],
)
def test_memory_is_spread_once(
    nodes: list[int],
    is_allowed: bool,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "pegboard")
    asked: list[object] = []
    monkeypatch.setattr(platform, "memory_nodes", lambda cpus: nodes)
    monkeypatch.setattr(platform, "interleave", lambda of: asked.append(of) or is_allowed)
    monkeypatch.setattr(CPUPlatform, "threads_in_use", None)
    for _ in range(2):
        CPUPlatform(None, PlatformSetup()).start(0)
    assert asked == ([nodes] if len(nodes) > 1 else [])
    assert words in caplog.text if words else not caplog.text
