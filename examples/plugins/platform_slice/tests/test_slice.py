"""The contract of the kind, the limits of a slice, and an engine that keeps to them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pegboard_platform_slice import memory
from pegboard_platform_slice.cpus import numbers, share
from pegboard_platform_slice.options import SliceOptions
from pegboard_platform_slice.platform import SlicePlatform
from pegboard_platform_slice.probe import probe
from pydantic import ValidationError

from pegboard.cli.main import main
from pegboard.errors import ConfigError
from pegboard.interfaces.platform import PlatformSetup
from pegboard.interfaces.spec import Absent, Ok, ProbeFacts
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_platform import PlatformContract
from pegboard_testing.tiny_engine import tokens

FACTS = ProbeFacts("x86_64", frozenset(), 4)


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Pretend that no engine has run in this process yet. Return the CPUs that it may use."""
    threads = torch.get_num_threads()
    cpus = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(SlicePlatform, "in_use", None)
    monkeypatch.setattr(SlicePlatform, "base_bytes", 0)
    yield cpus
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(threads)


def platform(setup: PlatformSetup | None = None, **options: object) -> SlicePlatform:
    return SlicePlatform(SliceOptions.model_validate(options), setup or PlatformSetup())


def test_contract() -> None:
    check_entry(installed_entry("platform", "slice"))


class TestSlice(PlatformContract):
    def platform(self, setup: PlatformSetup) -> SlicePlatform:
        return platform(setup)


def test_the_thread_is_bound_to_the_slice(own_process: list[int]) -> None:
    last = own_process[-1]
    device = platform(cpus=str(last)).start(0)
    assert os.sched_getaffinity(0) == {last}
    assert device.num_threads == torch.get_num_threads() == 1


def test_a_second_engine_has_the_same_slice(own_process: list[int]) -> None:
    platform(cpus=str(own_process[0])).start(0)
    platform(cpus=str(own_process[0])).start(0)
    with pytest.raises(ConfigError, match="3 threads .* already computes with 1"):
        platform(PlatformSetup(num_threads=3), cpus=str(own_process[0])).start(0)


def test_cpus_that_the_process_may_not_use_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"platform\.slice\.cpus: .* not run on \[4095\]"):
        platform(cpus="4095").start(0)


@pytest.mark.parametrize("text", ["a", "3-1", "1-", "-1", "0,x"])
def test_what_is_no_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="is no list of CPUs"):
        SliceOptions(cpus=text)


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 9))
def test_ranks_share_the_cpus(cpus: set[int], num_ranks: int) -> None:
    assert numbers(",".join(map(str, cpus))) == sorted(cpus)
    shares = [share(sorted(cpus), rank, num_ranks) for rank in range(num_ranks)]
    assert all(each and set(each) <= cpus for each in shares)
    if num_ranks <= len(cpus):
        assert len({cpu for each in shares for cpu in each}) == sum(map(len, shares))


def test_the_limit_is_shared_and_kept() -> None:
    # what earlier tests have freed would be used again, and counts already
    ctypes.CDLL(None).malloc_trim(0)
    part = platform(PlatformSetup(local_ranks=2), memory_gib=0.5)
    part.start(0)
    before = part.memory(reset_peak=True)
    assert before.total_bytes == 1 << 28
    cache = part.zeros(1 << 26)
    after = part.memory()
    assert after.used_bytes - before.used_bytes > (1 << 25), "the cache counts at once"
    assert cache.sum() == 0
    with pytest.raises(ConfigError, match=r"KV cache does not fit.*platform\.slice\.memory_gib"):
        part.zeros(1 << 28)


def test_a_peak_that_cannot_be_reset_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "CLEAR", tmp_path)
    part = platform()
    part.start(0)
    numbers = part.memory(reset_peak=True)
    assert numbers.peak_bytes >= numbers.used_bytes


def test_the_probe(own_process: list[int]) -> None:
    assert probe(FACTS) == Ok({"cpus": len(own_process), "of": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pegboard_platform_slice.probe.STATUS", Path("/nowhere"))
        assert isinstance(probe(FACTS), Absent)
        patch.delattr(os, "sched_setaffinity")
        verdict = probe(FACTS)
    assert isinstance(verdict, Absent) and "Linux can" in verdict.reason


def test_an_engine_serves_on_it(tmp_path: Path, own_process: list[int]) -> None:
    """The tokens are those of the platform `cpu`."""
    plain = tokens(tmp_path, device="cpu")
    options = {"platform.slice": {"cpus": str(own_process[0]), "memory_gib": 0.5}}
    assert tokens(tmp_path, device="slice", plugin_options=options) == plain
    assert SlicePlatform.in_use == ([own_process[0]], 1)


def test_the_cache_gets_what_the_model_leaves_of_the_limit(tmp_path: Path) -> None:
    def tokens_within(memory_gib: float) -> list[list[int]]:
        options = {"platform.slice": {"memory_gib": memory_gib}}
        return tokens(
            tmp_path, device="slice", num_gpu_blocks_override=None, plugin_options=options
        )

    assert all(tokens_within(0.5))
    with pytest.raises(ConfigError, match="KV cache|kv_cache"):
        tokens_within(0.0001)  # less than one request needs


def test_the_commands_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "why", "platform", "--name", "slice"]) == 0
    assert "platform → slice   pegboard-platform-slice 0.1.0   (asked for)" in (
        capsys.readouterr().out
    )
    assert main(["plugins", "why", "platform"]) == 0
    assert "platform → slice" not in capsys.readouterr().out, "installing it changes nothing"
    assert main(["plugins", "list", "--kind", "platform"]) == 0
    assert "slice" in capsys.readouterr().out
