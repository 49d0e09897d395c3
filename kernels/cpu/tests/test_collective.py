"""The collective of shared memory: its contract, recorded calls, and its kernels on every level."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest
import torch
from pegboard_kernel_cpu import collective as shared_memory
from pegboard_kernel_cpu.collective import SharedMemoryCollective
from pegboard_kernel_cpu.library import Library
from pegboard_kernel_cpu.lora import lora_add
from pegboard_kernel_cpu.replay import NativeReplay
from pegboard_kernel_cpu.structures import Exchange, Member

from pegboard.errors import ConfigError, EngineDeadError
from pegboard.interfaces.collective import CollectiveSetup
from pegboard.ops import AdapterExchange
from pegboard_testing.contract_collective import CollectiveContract, error_of
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_build import adapter_rows


def test_contract() -> None:
    check_entry(installed_entry("collective", "shared_memory"))


class TestSharedMemory(CollectiveContract):
    def collective(self, setup: CollectiveSetup) -> SharedMemoryCollective:
        return SharedMemoryCollective(None, setup)

    def rank_replays(self, setup: CollectiveSetup) -> list[Any]:
        """Replay all calls for several numbers of tokens. Then the last rank does not come."""
        collective = self.collective(setup)

        def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            whole = collective.all_gather(x[:, 2:5])
            total = collective.all_reduce((x * 2).view(-1, 4, 8))
            return whole, total.view(-1, 32) + x, collective.broadcast(x + 1, 1)

        x = torch.zeros(700, 32)
        recording = NativeReplay().record(run, [x])
        found: list[Any] = []
        for count in (1, 700, 3):
            x[:count] = torch.arange(32.0) + setup.rank + torch.arange(count)[:, None]
            found.append([result.clone() for result in recording(count)])
        if setup.rank == len(setup.ranks) - 1:
            self.kept = collective
        else:
            found.append(error_of(lambda: recording(1))[0])
        return found

    def test_recorded_calls(self) -> None:
        results = self.on_ranks("rank_replays", ranks=(0, 5), timeout_s=1.0)
        for place, count in enumerate((1, 700, 3)):
            first, second = (
                torch.arange(32.0) + rank + torch.arange(count)[:, None] for rank in (0, 1)
            )
            for own, result in zip((first, second), results, strict=True):
                assert torch.equal(result[place][0], torch.cat([first[:, 2:5], second[:, 2:5]], 1))
                assert torch.equal(result[place][1], 2 * (first + second) + own)
                assert torch.equal(result[place][2], second + 1)
        assert "all_gather" in results[0][3] and "5" in results[0][3]

    def rank_starts_slowly(self, setup: CollectiveSetup) -> list[float]:
        """A file of ranks that were killed has the name of this group."""
        if setup.rank == 0:
            time.sleep(0.2)
        else:
            path = shared_memory._place(setup)
            path.write_bytes(bytes(shared_memory._size(setup)))
        with self.member(setup) as collective:
            total: list[float] = collective.all_reduce(torch.ones(1, 2))[0].tolist()
            assert not shared_memory._place(setup).exists()
            return total

    def test_what_remains_of_killed_ranks_is_replaced(self) -> None:
        assert self.on_ranks("rank_starts_slowly", ranks=(0, 1)) == [[2.0, 2.0]] * 2


def alone(folder: Any) -> SharedMemoryCollective:
    setup = CollectiveSetup("tensor", (0,), 0, f"{folder.as_uri()}/meet", "cpu", 1.0)
    return SharedMemoryCollective(None, setup)


def test_dtypes_that_cannot_be_added(tmp_path: Any) -> None:
    collective = alone(tmp_path)
    with pytest.raises(ConfigError, match="int64"):
        collective.all_reduce(torch.ones(1, 2, dtype=torch.int64))
    ids = torch.arange(6).view(2, 3)
    assert torch.equal(collective.all_gather(ids), ids)
    collective.close()
    with pytest.raises(EngineDeadError, match="closed"):
        collective.all_gather(ids)


@pytest.mark.parametrize("call", ["all_gather", "all_reduce"])
def test_products_of_adapters_are_exchanged_in_a_recording(tmp_path: Any, call: str) -> None:
    """Only some columns of the output are written."""
    collective = alone(tmp_path)
    ranks = torch.tensor([5, 16, 0], dtype=torch.int32)
    a = torch.zeros(3, 32, 16)
    b = torch.zeros(3, 16, 24)
    for slot, rank in enumerate(ranks.tolist()):
        a[slot, :, :rank].normal_()
        b[slot, :rank].normal_()
    exchange = AdapterExchange(getattr(collective, call), 1, [0], ranks)
    slots = [0, 2, 1, 3, 1, 2, 2]
    rows = adapter_rows(slots, 3)

    def run(x: torch.Tensor) -> tuple[torch.Tensor]:
        y = x * 2
        lora_add(y[:, 8:], x, a, b, ranks, (0, 24), rows, exchange)
        return (y + x,)

    given = torch.zeros(len(slots), 32)
    recording = NativeReplay().record(run, [given])
    for _ in range(3):
        given.normal_()
        (found,) = recording(len(slots))
        expected = given * 3
        for row, slot in enumerate(slots):
            if slot:
                expected[row, 8:] += given[row] @ a[slot - 1] @ b[slot - 1]
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    collective.close()


@pytest.mark.parametrize("dtype", shared_memory.TYPES)
@pytest.mark.parametrize("kernel", shared_memory.CALLS)
def test_kernels_of_every_level(native: Library, kernel: str, dtype: torch.dtype) -> None:
    """Two teams share memory, one of them with a single thread. The tensors of 0.6 to 1.2 MB wrap
    around the cells, and their rows do not fill vectors."""
    path = native._functions._name
    teams = [native, Library(native.level, path, 1)]
    size = native.size_of_collective(2)
    memory = torch.zeros(size + 64, dtype=torch.uint8)
    start = -(-memory.data_ptr() // 64) * 64
    members = [Member(shared=start, rank=rank, ranks=2, timeout=int(2e10)) for rank in (0, 1)]
    wide = [torch.randn(300, 1031).to(dtype) for _ in members]
    xs = [each[:, :1029] for each in wide]
    width = 1029 * (2 if kernel == "all_gather" else 1)
    outs = [torch.zeros(300, width, dtype=dtype) for _ in xs]

    def run(rank: int) -> None:
        for _ in range(2):
            arguments = Exchange(
                member=ctypes.addressof(members[rank]),
                x=xs[rank].data_ptr(),
                x_stride=1031,
                out=outs[rank].data_ptr(),
                out_stride=outs[rank].shape[1],
                columns=1029,
                item=dtype.itemsize,
                type=shared_memory.TYPES[dtype],
                source=1,
            )
            teams[rank].team_run([(kernel, arguments)], 300)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    teams[1].stop()
    both = [x.float() for x in xs]
    if kernel == "broadcast":
        assert torch.equal(outs[0], xs[1]), "the source writes nothing"
        return
    expected = both[0] + both[1] if kernel == "all_reduce" else torch.cat(both, 1)
    for out in outs:
        assert torch.equal(out, expected.to(dtype))
