"""Ranks that are threads of one process. Only one computes at a time; another goes on when it waits
for the others. Kernels therefore see one caller, as in the product."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from pegboard.config.schema import EngineConfig
from pegboard.data.batch import Batch, StepOutput, TokenMasks
from pegboard.data.transfers import TransferMerger
from pegboard.errors import CannotRecord, EngineDeadError
from pegboard.interfaces.executor import ExecutorSetup, Place, WorkerDeath, WorkerReady
from pegboard.layers.shards import Group
from pegboard.worker import parts
from pegboard.worker.parts import Ranks

T = TypeVar("T")
PATIENCE_S = 60


class Meeting:
    """Where the threads exchange tensors. turn: held by the one that computes. groups: of some of
    the threads."""

    def __init__(self, size: int, turn: threading.Lock | None = None) -> None:
        self.turn = turn or threading.Lock()
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.tensors: list[Tensor] = [torch.empty(0)] * size
        self.groups: dict[object, Meeting] = {}

    def of(self, name: str, ranks: Sequence[int]) -> Meeting:
        """Return the meeting of a group of ranks."""
        return self.groups.setdefault((name, tuple(ranks)), Meeting(len(ranks), self.turn))

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks."""
        if type(x) is not Tensor:
            raise CannotRecord("ranks that are threads exchange tensors")
        self.tensors[rank] = x.clone()
        self._wait()
        tensors = list(self.tensors)
        self._wait()
        return tensors

    def _wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise EngineDeadError("another rank has failed") from error
        finally:
            self.turn.acquire()

    def run(self, compute: Callable[[], T]) -> T:
        """Compute while no other rank does."""
        with self.turn:
            try:
                return compute()
            except BaseException:
                for meeting in (self, *self.groups.values()):
                    meeting.barrier.abort()
                raise

    def reset(self) -> None:
        """Let the ranks meet again, after one has failed."""
        for meeting in (self, *self.groups.values()):
            meeting.barrier.reset()


class FakeCollective:
    """See `pegboard.interfaces.collective.Collective`. It refuses tensors of different shapes, and
    sums of integers."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_floating_point(), f"all_reduce got {x.dtype}"
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0).to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        tensors = self.meeting.exchange(self.rank, x)
        assert all(tensor.shape == x.shape for tensor in tensors), "the ranks' shapes differ"
        return torch.cat(tensors, 1)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        tensors = self.meeting.exchange(self.rank, x)
        assert all(tensor.shape == x.shape for tensor in tensors), "the ranks' shapes differ"
        return tensors[source]

    def close(self) -> None: ...


def on_ranks(size: int, run: Callable[[Group], T]) -> list[T]:
    """Run a function in a thread for each rank, and return the results. Raises what the first
    thread that failed raised."""
    meeting = Meeting(size)
    groups = [Group(rank, size, FakeCollective(meeting, rank)) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(meeting.run, partial(run, group)) for group in groups]
    return results_of(futures)


def results_of(futures: Sequence[Future[T]]) -> list[T]:
    """Return the results, or raise the error of the rank that failed first."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, EngineDeadError)):
        raise error
    return [future.result() for future in futures]


class ThreadsExecutor:
    """An executor whose workers are threads of this process, with a FakeCollective. A step is
    computed when its result is requested."""

    def __init__(self, options: None, setup: ExecutorSetup) -> None:
        self.ranks = range(setup.ranks)
        self.sampling = setup.sampling
        self.meeting = Meeting(setup.ranks)
        self.workers = [setup.make_worker(Place(i, setup.ranks, i, 1)) for i in self.ranks]
        self.threads = [ThreadPoolExecutor(1) for _ in self.ranks]
        self.masks: dict[int, Future[TokenMasks]] = {}
        self.transfers = TransferMerger(setup.ranks)
        self.make_ranks = parts.make_ranks
        parts.make_ranks = self._make_ranks

    def _make_ranks(self, registry: Any, config: EngineConfig, place: Place, *_: Any) -> Ranks:
        return parts.groups_of(config, place.rank, partial(self._connect, place.rank))

    def _connect(self, rank: int, name: str, ranks: range) -> FakeCollective:
        return FakeCollective(self.meeting.of(name, ranks), ranks.index(rank))

    def _all(self, method: str, *args: object) -> list[Any]:
        futures = [
            thread.submit(self.meeting.run, partial(getattr(worker, method), *args))
            for worker, thread in zip(self.workers, self.threads, strict=True)
        ]
        wait(futures)
        self.meeting.reset()  # a rank that has failed has broken it
        return results_of(futures)

    def start(self) -> list[WorkerReady]:
        try:
            return self._all("load")
        finally:
            parts.make_ranks = self.make_ranks

    def submit(self, batch: Batch) -> ThreadsStep:
        if batch.needs_masks:
            self.masks[batch.step] = Future()
        return ThreadsStep(partial(self._run, batch, self.masks.get(batch.step)))

    def _run(self, batch: Batch, masks: Future[TokenMasks] | None) -> StepOutput:
        outputs = [finish() for finish in self._all("run", batch, masks.result if masks else None)]
        for rank, output in enumerate(outputs):
            self.transfers.add(rank, output.transfers)
        output = outputs[self.sampling.start]
        output.transfers = self.transfers.take()
        return output

    def provide_masks(self, step: int, masks: TokenMasks) -> None:
        self.masks.pop(step).set_result(masks)

    def call(self, method: str, *args: object) -> list[object]:
        return self._all("call", method, *args)

    def watch(self, on_death: Callable[[WorkerDeath], None]) -> None: ...

    def stop(self) -> None:
        for worker, thread in zip(self.workers, self.threads, strict=True):
            thread.submit(worker.stop).result()
            thread.shutdown()
        self.workers = []
        self.threads = []


class ThreadsStep:
    """Steps run in order: the engine requests the results of earlier ones first."""

    def __init__(self, run: Callable[[], StepOutput]) -> None:
        self.result = cache(run)
