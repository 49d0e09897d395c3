"""A fake KV connector, and a fake LoRA resolver. Both halves of the connector share a dictionary.
Delays, failures and pinned saves are possible on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from pegboard.data.batch import Batch, TransferReport
from pegboard.interfaces.attention import KVGroup, KVView
from pegboard.interfaces.kv_connector import (
    BlockView,
    KVConnectorScheduler,
    KVConnectorSetup,
    KVConnectorWorker,
    Match,
    Release,
)
from pegboard.interfaces.scheduling_policy import RequestView

Load = Literal["in_step", "between_steps"]
Place = tuple[int, int, int, bytes]
"""(group, index in the table, block id, hash)."""


class _Plan(msgspec.Struct):
    """The plan that the scheduler half sends to the worker half, by request key."""

    loads: dict[str, list[Place]] = {}
    saves: dict[str, list[Place]] = {}


Halves = tuple[KVConnectorScheduler, KVConnectorWorker]


@dataclass
class FakeKV:
    """Makes the halves of a fake KV connector. load, hesitate: see FakeKVConnector. store: shares
    the contents between engines. fails: see FakeKVConnectorWorker."""

    load: Load = "in_step"
    store: dict[tuple[int, int, bytes], Any] = field(default_factory=dict)
    fails: Callable[[str], int | None] = lambda key: None
    hesitate: int = 0

    def __call__(self, setup: KVConnectorSetup) -> Halves:
        scheduler = FakeKVConnector(setup, self.store, load=self.load, hesitate=self.hesitate)
        worker = FakeKVConnectorWorker(setup, self.store, load=self.load, fails=self.fails)
        return scheduler, worker


class FakeKVConnector:
    """The scheduler half. It saves the full blocks of finished requests, which stay pinned
    meanwhile, and finds prefixes by hash. store: (rank, group, hash) → block contents, shared with
    the worker half. hesitate: how many times `match` first returns None. holding: the requests
    whose blocks it was told of, and not that they were released.
    """

    def __init__(
        self,
        setup: KVConnectorSetup,
        store: dict[tuple[int, int, bytes], Any],
        *,
        load: Load = "in_step",
        hesitate: int = 0,
    ) -> None:
        plan = setup.plan
        self._sizes = [group.block_size for group in plan.groups]
        self._stride = plan.hash_block_size
        self._expired = setup.expired
        self._store = store
        self._rank = setup.rank
        self._load = load
        self._hesitate = hesitate
        self._local: dict[str, int] = {}
        self._plan = _Plan()
        self._loading: set[str] = set()
        self.holding: set[str] = set()
        self.num_loads = 0
        self.num_resets = 0

    def match(self, request: RequestView, num_local_tokens: int) -> Match | None:
        if self._hesitate:
            self._hesitate -= 1
            return None
        step = math.lcm(*self._sizes)
        longest = (
            min(request.num_tokens - 1, len(request.block_hashes) * self._stride) // step * step
        )
        ends = range(longest, num_local_tokens, -step)
        end = next(
            (end for end in ends if self._has_all(request, num_local_tokens, end)), num_local_tokens
        )
        self._local[request.key] = num_local_tokens
        return Match(end - num_local_tokens, self._load)

    def _has_all(self, request: RequestView, start: int, stop: int) -> bool:
        """Return whether the store has all blocks that a request with `stop` computed tokens still
        reads. With a window these are not all blocks."""
        return all(
            self._is_stored(request, group, index)
            for group, size in enumerate(self._sizes)
            for index in range(start // size, stop // size)
            if index not in self._expired[group](stop)
        )

    def _is_stored(self, request: RequestView, group: int, index: int) -> bool:
        return (self._rank, group, self._hash(request, self._sizes[group], index)) in self._store

    def _hash(self, request: RequestView, size: int, index: int) -> bytes:
        return request.block_hashes[(index + 1) * size // self._stride - 1]

    def allocated(self, request: RequestView, blocks: BlockView, num_external_tokens: int) -> None:
        assert request.key not in self.holding, f"the blocks of {request.key} are allocated twice"
        self.holding.add(request.key)
        start = self._local.pop(request.key, 0)
        if not num_external_tokens:
            return
        self.num_loads += 1
        self._loading.add(request.key)
        places = self._places(request, blocks, start, start + num_external_tokens)
        self._plan.loads[request.key] = [
            place for place in places if (self._rank, place[0], place[3]) in self._store
        ]

    def _places(
        self, request: RequestView, blocks: BlockView, start: int, stop: int
    ) -> list[Place]:
        return [
            (group, index, blocks.block_ids[group][index], self._hash(request, size, index))
            for group, size in enumerate(self._sizes)
            for index in range(start // size, stop // size)
            if blocks.block_ids[group][index]
        ]

    def plan(self, batch: Batch) -> bytes:
        plan = self._plan
        self._plan = _Plan()
        return msgspec.msgpack.encode(plan)

    def released(self, request: RequestView, blocks: BlockView, why: str) -> Release:
        assert request.key in self.holding, (
            f"{request.key} releases blocks that were never allocated"
        )
        self.holding.remove(request.key)
        if request.key in self._loading:  # the load may still be writing
            return Release(later=True)
        num_valid = min(
            request.num_confirmed_tokens,
            request.num_tokens,
            len(request.block_hashes) * self._stride,
        )
        places = self._places(request, blocks, 0, num_valid)
        if why != "finished" or not places:
            return Release()
        self._plan.saves[request.key] = places
        return Release(later=True, parameters={"num_saved_blocks": len(places)})

    def update(self, reports: Sequence[TransferReport]) -> None:
        for report in reports:
            self._loading -= {*report.loaded, *report.failed}

    def reset(self) -> None:
        self.num_resets += 1


class FakeKVConnectorWorker:
    """The worker half. delay: number of steps that a load or save takes (a load "in_step" is always
    immediate). fails: key → first bad token of this load, or None if it succeeds."""

    def __init__(
        self,
        setup: KVConnectorSetup,
        store: dict[tuple[int, int, bytes], Any],
        *,
        load: Load = "in_step",
        delay: int = 1,
        fails: Callable[[str], int | None] = lambda key: None,
    ) -> None:
        self._sizes = [group.block_size for group in setup.plan.groups]
        self._store = store
        self._rank = setup.rank
        self._delay = 0 if load == "in_step" else delay
        self._save_delay = delay
        self._fails = fails
        self._memory: np.ndarray = np.zeros((0, 0))
        self._loads: list[list[Any]] = []
        self._saves: list[list[Any]] = []

    def register(self, views: Mapping[int, KVView], groups: Sequence[KVGroup]) -> None:
        self._memory = views[groups[0].layers[0]]["kv"]

    def save(self, plan: bytes) -> None:
        """Do nothing: `end` saves, because what it saves is pinned."""

    def begin(self, plan: bytes) -> None:
        decoded = msgspec.msgpack.decode(plan, type=_Plan)
        self._loads.extend([self._delay, key, places] for key, places in decoded.loads.items())
        self._saves.extend([self._save_delay, key, places] for key, places in decoded.saves.items())
        self._report = TransferReport([], [], {})
        for load in self._loads:
            if load[0] == 0:
                self._copy_in(load[1], load[2])
        self._loads = [load for load in self._loads if load[0] > 0]

    def _copy_in(self, key: str, places: list[Place]) -> None:
        bad = self._fails(key)
        for group, index, block_id, block_hash in places:
            self._memory[block_id] = self._store[self._rank, group, block_hash]
            if bad is not None:
                self._memory[block_id, max(0, bad - index * self._sizes[group]) :] = -7
        if bad is None:
            self._report.loaded.append(key)
        else:
            self._report.failed[key] = bad

    def end(self) -> TransferReport:
        for save in self._saves:
            if save[0] <= 0:
                for group, _, block_id, block_hash in save[2]:
                    self._store[self._rank, group, block_hash] = self._memory[block_id].copy()
                self._report.saved.append(save[1])
        self._saves = [save for save in self._saves if save[0] > 0]
        for entry in (*self._loads, *self._saves):
            entry[0] -= 1
        return self._report

    def close(self) -> None:
        self._loads.clear()
        self._saves.clear()
