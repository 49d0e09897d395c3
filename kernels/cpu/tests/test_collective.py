"""The collective of this package passes the contract of its kind, also with several threads for
each rank, and in recordings."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_kernel_cpu.collective import SharedMemory
from pegboard_kernel_cpu.replay import NativeReplay
from torch import Tensor

from pegboard.errors import ConfigError, EngineDeadError
from pegboard.interfaces.collective import CollectiveSetup
from pegboard_testing.contract_collective import CollectiveContract
from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("collective", "shared_memory"))


def with_threads(options: None, setup: CollectiveSetup) -> SharedMemory:
    torch.set_num_threads(3)
    return SharedMemory(options, setup)


class TestSharedMemory(CollectiveContract):
    collective = "pegboard_kernel_cpu.collective:SharedMemory"

    def test_exchanges_are_recorded(self, tmp_path: Path) -> None:
        first, second = self.on_ranks(tmp_path, 2, recorded)
        assert first == second == [[9.0 * n, 30.0 * n] for n in (1, 2, 5)]

    def test_a_rank_that_does_not_come_to_a_recorded_exchange(self, tmp_path: Path) -> None:
        message, _ = self.on_ranks(tmp_path, 2, absent_later, timeout_s=2.0)
        assert "of the group 'tensor'" in message and "missing now: 1" in message


class TestThreads(CollectiveContract):
    collective = f"{__name__}:with_threads"
    sizes = (2,)


def recorded(collective: SharedMemory, rank: int, size: int) -> list[list[float]]:
    """Replay a recording with an exchange of each kind, for several numbers of tokens."""
    replay = NativeReplay()
    x = torch.full((5, 3), float(rank + 1))

    def run(x: Tensor) -> tuple[Tensor, ...]:
        total = collective.all_reduce(x)
        return total, collective.all_gather(collective.all_reduce(total)[:, 1:])

    program = replay.record(run, [x])
    results = []
    for count in (1, 2, 5):
        total, rows = program(count)
        assert rows.shape == (count, 4)
        results.append([total.sum().item(), rows.sum().item() * 1.25])
    return results


def absent_later(collective: SharedMemory, rank: int, size: int) -> str:
    replay = NativeReplay()
    program = replay.record(lambda x: (collective.all_reduce(x),), [torch.ones(2, 3)])
    program(2)
    if rank:
        return ""
    try:
        program(1)
    except EngineDeadError as error:
        return str(error)
    return "no error"


def test_nothing_has_a_name(tmp_path: Path) -> None:
    """The memory of a group has no name that could remain."""
    before = set(os.listdir("/dev/shm"))
    made: dict[int, SharedMemory] = {}

    def join(rank: int) -> None:
        setup = CollectiveSetup("tensor", (0, 1), rank, f"{tmp_path.as_uri()}/meet", "cpu", 30.0)
        made[rank] = SharedMemory.__new__(SharedMemory)
        prepared: Any = made[rank]
        prepared.setup = setup
        prepared.size = 2
        prepared.place = tmp_path / "meet"
        prepared.num_bytes = 1 << 16
        prepared.memory = prepared._open()

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made[0].memory[7] = 3
    assert made[1].memory[7] == 3
    assert set(os.listdir("/dev/shm")) == before
    made[0].close()


def test_hosts_cannot_share_memory() -> None:
    setup = CollectiveSetup("tensor", (0, 1), 0, "tcp://10.0.0.1:4000", "cpu", 1.0)
    with pytest.raises(ConfigError, match="shared memory needs file:///path"):
        SharedMemory(None, setup)
