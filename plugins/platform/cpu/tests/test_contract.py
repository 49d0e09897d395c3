"""The platform passes the contract of its kind and the generic contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pegboard_platform_cpu.platform import KV_CACHE_LIMIT, CPUPlatform, container_memory
from pegboard_platform_cpu.probe import probe
from pegboard_platform_cpu.topology import memory_nodes, num_cores

from pegboard.env import usable_cpus
from pegboard.errors import ConfigError
from pegboard.interfaces.platform import PlatformSetup
from pegboard.interfaces.spec import Absent, Ok, ProbeFacts
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_platform import PlatformContract


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that no engine has run in this process yet."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(CPUPlatform, "threads_in_use", None)
    yield
    torch.set_num_threads(threads)


def test_contract() -> None:
    check_entry(installed_entry("platform", "cpu"))


class TestCPUPlatform(PlatformContract):
    def platform(self, setup: PlatformSetup) -> CPUPlatform:
        return CPUPlatform(None, setup)


def test_threads_are_the_users() -> None:
    assert CPUPlatform(None, PlatformSetup(num_threads=3)).start(0).num_threads == 3
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("value", "expected"), [("", num_cores(usable_cpus())), ("3", 3), (" 5,2 ", 5)]
)
def test_threads_are_those_of_openmp(
    value: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert CPUPlatform(None, PlatformSetup()).num_threads == expected
    assert CPUPlatform(None, PlatformSetup(num_threads=2)).num_threads == 2


@pytest.mark.parametrize("value", ["0", "-1", "many", "2.5"])
def test_what_is_no_number_of_threads_is_an_error(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
        CPUPlatform(None, PlatformSetup())


def test_two_engines_must_agree_on_threads() -> None:
    CPUPlatform(None, PlatformSetup(num_threads=1)).start(0)
    with pytest.raises(
        ConfigError, match="num_threads=2, but this process already computes with 1"
    ):
        CPUPlatform(None, PlatformSetup(num_threads=2)).start(0)


def test_the_cache_takes_a_share_of_what_is_free() -> None:
    platform = CPUPlatform(None, PlatformSetup())
    size = platform.defaults("float32")["kv_cache_memory_bytes"]
    assert isinstance(size, int) and 0 < size <= min(KV_CACHE_LIMIT, platform.memory().total_bytes)


def test_more_memory_than_there_can_be_is_an_error_that_names_the_setting() -> None:
    for num_bytes in (10**15, 10**20):
        with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
            CPUPlatform(None, PlatformSetup()).zeros(num_bytes)


def test_only_missing_torch_makes_a_cpu_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegboard_platform_cpu.probe.cpu_quota", lambda: 2.5)
    facts = ProbeFacts("x86_64", frozenset({"avx2", "avx512_bf16"}), 4)
    found = probe(facts)
    assert isinstance(found, Ok)
    cores = num_cores(usable_cpus())
    assert found.facts == {
        "level": "avx2",
        "cpus": 4,
        "cores": cores,
        "memory nodes": max(1, len(memory_nodes(usable_cpus()))),
        "quota of cores": 2.5,
        "bfloat16": True,
    }
    monkeypatch.setattr("pegboard_platform_cpu.probe.find_spec", lambda name: None)
    missing = probe(facts)
    assert isinstance(missing, Absent) and "pip install torch" in missing.reason


@pytest.mark.parametrize(
    ("limit", "taken", "inactive"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_the_limit_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, taken: str, inactive: str
) -> None:
    (tmp_path / "memory").mkdir()
    assert container_memory(tmp_path) is None
    (tmp_path / taken).write_text("700\n")
    (tmp_path / limit).with_name("memory.stat").write_text(f"anon 300\n{inactive} 200\n")
    for text in ("max", str(2**63 - 4096)):
        (tmp_path / limit).write_text(f"{text}\n")
        assert container_memory(tmp_path) is None
    (tmp_path / limit).write_text("1000\n")
    assert container_memory(tmp_path) == (1000, 500)
    monkeypatch.setattr("pegboard_platform_cpu.platform.container_memory", lambda: (1000, 500))
    numbers = CPUPlatform(None, PlatformSetup()).memory()
    assert (numbers.total_bytes, numbers.free_bytes) == (1000, 500)
    share = CPUPlatform(None, PlatformSetup(local_ranks=2)).memory()
    assert (share.total_bytes, share.free_bytes) == (500, 250)


def test_missing_kernels_are_told_with_their_package(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    platform = CPUPlatform(None, PlatformSetup())
    platform.replay(None)
    assert not caplog.text, "kernels that are installed but do not suit are told elsewhere"
    monkeypatch.setattr("pegboard_platform_cpu.platform.find_spec", lambda name: None)
    platform.replay(None)
    assert "pip install pegboard-kernel-cpu" in caplog.text
