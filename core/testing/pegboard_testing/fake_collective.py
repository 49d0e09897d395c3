"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from pegboard.layers.shards import Group

T = TypeVar("T")
PATIENCE_S = 60


class Meeting:
    """Where the threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.tensors: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks."""
        self.tensors[rank] = x.clone()
        self.barrier.wait()
        tensors = list(self.tensors)
        self.barrier.wait()
        return tensors


class FakeCollective:
    """See `pegboard.interfaces.collective.Collective`. It refuses tensors of different shapes."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0).to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        tensors = self.meeting.exchange(self.rank, x)
        assert all(tensor.shape == x.shape for tensor in tensors), "the ranks' shapes differ"
        return torch.cat(tensors, 1)

    def close(self) -> None: ...


def on_ranks(size: int, run: Callable[[Group], T]) -> list[T]:
    """Run a function in a thread for each rank, and return the results. Raises what the first
    thread that failed raised."""
    meeting = Meeting(size)

    def rank(number: int) -> T:
        try:
            return run(Group(number, size, FakeCollective(meeting, number)))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(rank, number) for number in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
