"""The scheduler half of connectors that keep blocks in a store by their hashes. It imports no
torch.

Blocks are saved as soon as they are full and no step in flight can change them, so a prefix can be
loaded while the request that computed it still runs, and a window has not dropped the blocks yet.
The block tables come from the batches and not from the engine's tables: a batch says which blocks a
request got, and what the engine has dropped since stays intact until the worker half has read it
(see `KVConnectorWorker.save`).

States are saved by the step that goes on at a place where a prefix may end, because that step
changes them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pegboard.data.batch import Batch, TransferReport
from pegboard.interfaces.attention import State
from pegboard.interfaces.kv_connector import BlockView, KVConnectorSetup, Match, Release
from pegboard.interfaces.scheduling_policy import RequestView
from pegboard_kv.plan import Place, TransferPlan, encode
from pegboard_kv.role import Role


class BlockStore(Protocol):
    """What a store has, as the scheduler half knows it. A block has a name: its KV group and its
    hash. A slot is the block's number in the store; a store that finds its blocks by name uses
    0."""

    def find(self, group: int, block_hash: bytes) -> int | None:
        """Return the slot of a block, or None if the store does not have it."""

    def use(self, group: int, block_hash: bytes) -> int:
        """Return the slot of a block that `find` has just found. It will be loaded, so its slot
        must keep it until the plan is sent."""

    def reserve(self, group: int, block_hash: bytes) -> int | None:
        """Return a slot for a block to save, or None if it is not to be saved: the store has it or
        has no room."""

    def sent(self) -> None:
        """The plan with all slots that were used and reserved is on its way."""


@dataclass(slots=True)
class _Tracked:
    """A request that holds blocks. tables: its block ids per KV group, including blocks that were
    dropped since. num_seen: blocks per group that were considered for saving. start: how many
    tokens were cached. wake_at: below this number of confirmed tokens there is nothing new.
    state_at, saved_at: the last places, in tokens, where its states were considered for saving, and
    were saved."""

    request: RequestView
    tables: list[list[int]]
    num_seen: list[int]
    start: int = 0
    wake_at: int = 0
    state_at: int = 0
    saved_at: int = 0


@dataclass(slots=True)
class _Pending:
    """What the next plan will say."""

    loads: dict[str, list[Place]] = field(default_factory=dict)
    saves: list[Place] = field(default_factory=list)
    released: list[str] = field(default_factory=list)


class StoreScheduler:
    """Finds prefixes in the store, and plans loads and saves. The methods `end_of`, `saves`,
    `saved` and `parameters_of` may be overridden. load: when prefixes are loaded (see `Match`).
    wait_s: how long a request with do_remote_prefill waits, in seconds, for blocks that another
    engine is about to save. alignment: prefixes that can be loaded are multiples of it, in
    tokens."""

    def __init__(
        self,
        setup: KVConnectorSetup,
        store: BlockStore,
        *,
        load: Literal["in_step", "between_steps"],
        role: Role = "kv_both",
        wait_s: float = 0.0,
    ) -> None:
        plan = setup.plan
        self._sizes = [group.block_size for group in plan.groups]
        self._strides = [size // plan.hash_block_size for size in self._sizes]
        are_states = [isinstance(group.spec.retain, State) for group in plan.groups]
        self._states = [group for group, is_state in enumerate(are_states) if is_state]
        self._tokens = [group for group, is_state in enumerate(are_states) if not is_state]
        self._hash_size = plan.hash_block_size
        self.alignment = math.lcm(*self._sizes)
        self._expired = setup.expired
        self._store = store
        self._load: Literal["in_step", "between_steps"] = load
        self._loads = role != "kv_producer"
        self._saves = role != "kv_consumer"
        self._wait_s = wait_s
        self._loading: dict[str, list[bytes]] = {}  # request key → the first hash of what is loaded
        self._tracked: dict[str, _Tracked] = {}
        self._by_row: dict[int, _Tracked] = {}
        self._pending = _Pending()

    # --- loads ------------------------------------------------------------------------------------

    def match(self, request: RequestView, num_local_tokens: int) -> Match | None:
        # an aborted request of the same name, whose report is still to come
        if request.key in self._loading:
            return None
        if (
            self._loading
            and request.block_hashes[num_local_tokens // self._hash_size :][:1]
            in self._loading.values()
        ):
            # another request loads these blocks; this one will find them in the prefix cache
            return None
        end = self.end_of(request, num_local_tokens) if self._loads else num_local_tokens
        if end < self.longest(request) and self._waits(request):
            return None
        return Match(end - num_local_tokens, self._load)

    def _waits(self, request: RequestView) -> bool:
        is_promised = (
            self._loads and (request.kv_transfer_params or {}).get("do_remote_prefill") is True
        )
        return (
            is_promised
            and not request.num_preemptions
            and time.time() < request.arrival_s + self._wait_s
        )

    def longest(self, request: RequestView) -> int:
        """Return the end of the longest prefix that a store can have. At least one token is
        computed."""
        return (
            min(request.num_tokens - 1, len(request.block_hashes) * self._hash_size)
            // self.alignment
            * self.alignment
        )

    def end_of(self, request: RequestView, start: int) -> int:
        """Return the end of the longest prefix that consists of `start` local tokens and of blocks
        that can be loaded: those in the store. If a prefix needs a block that is missing, then
        every shorter prefix that contains the block needs it too, so the search goes on at the
        block's first token."""
        end = self.longest(request)
        known: set[tuple[int, int]] = set()
        while end > start:
            missing = next((token for token in self._missing(request, start, end, known)), None)
            if missing is None:
                return end
            end = missing // self.alignment * self.alignment
        return start

    def _missing(
        self, request: RequestView, start: int, end: int, known: set[tuple[int, int]]
    ) -> Iterator[int]:
        """Yield the first tokens of blocks that a request with `end` computed tokens reads and that
        the store does not have. known: (group, index) of blocks that it has."""
        for group, size in enumerate(self._sizes):
            expired = self._expired[group](end)
            for index in range(start // size, end // size):
                if index in expired or (group, index) in known:
                    continue
                if self._store.find(group, self._hash(request, group, index)) is None:
                    yield index * size
                known.add((group, index))

    def _hash(self, request: RequestView, group: int, index: int) -> bytes:
        """Return the name of a full block: the chain's hash at its last token."""
        return request.block_hashes[(index + 1) * self._strides[group] - 1]

    def allocated(self, request: RequestView, blocks: BlockView, num_external_tokens: int) -> None:
        end = request.num_computed_tokens
        start = end - num_external_tokens
        tables = [list(table) for table in blocks.block_ids]
        self._tracked[request.key] = _Tracked(request, tables, [0] * len(tables), end)
        if not num_external_tokens:
            return
        self._loading[request.key] = request.block_hashes[start // self._hash_size :][:1]
        self._pending.loads[request.key] = [
            Place(group, block_id, self._store.use(group, block_hash), block_hash, token)
            for group, block_id, index, token in self._blocks_of(tables, start, end)
            if (block_hash := self._hash(request, group, index))
        ]

    def _blocks_of(
        self, tables: list[list[int]], start: int, end: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield (group, block id, index, first token) of what is loaded for the tokens start … end.
        Without the states, none of them is of use."""
        for group in self._tokens:
            size = self._sizes[group]
            for index in range(start // size, end // size):
                if tables[group][index]:
                    yield group, tables[group][index], index, index * size
        for group in self._states:
            yield group, tables[group][0], end // self._sizes[group] - 1, start

    # --- saves ------------------------------------------------------------------------------------

    def plan(self, batch: Batch) -> bytes:
        """Follow the batch's block tables, and return the transfers of its step."""
        self._follow(batch)
        if self._saves:
            for tracked in self._by_row.values():
                self._save_full(tracked)
            if self._states:
                self._save_states(batch)
        pending = self._pending
        self._pending = _Pending()
        self._store.sent()
        return encode(
            TransferPlan(
                pending.loads, pending.saves, pending.released, is_idle=batch.num_rows == 0
            )
        )

    def _follow(self, batch: Batch) -> None:
        for row in batch.removed_rows.tolist():
            self._by_row.pop(row, None)
        for new in batch.new:
            tracked = self._tracked.get(new.request_id)
            if tracked is not None:
                tracked.tables = [block_ids.tolist() for block_ids in new.block_ids]
                self._by_row[new.row] = tracked
        delta = batch.new_blocks
        if len(delta.rows):
            for row, group, block_ids in zip(
                delta.rows.tolist(), delta.groups.tolist(), delta.block_ids.lists(), strict=True
            ):
                if (tracked := self._by_row.get(row)) is not None:
                    tracked.tables[group] += block_ids

    def saves(self, request: RequestView) -> bool:
        """Return whether the blocks of this request are saved."""
        return True

    def saved(self, request: RequestView, places: Sequence[Place]) -> None:
        """The next plan saves these blocks of the request."""

    def _save_full(self, tracked: _Tracked) -> bool:
        """Plan to save the blocks that have become full and certain. Return whether there are
        any."""
        request = tracked.request
        if not self.saves(request):
            return False
        num_tokens = request.num_confirmed_tokens
        if num_tokens < tracked.wake_at:
            return False
        num_planned = len(self._pending.saves)
        num_hashes = len(request.block_hashes)
        num_tokens = min(num_tokens, request.num_tokens)
        for group in self._tokens:
            table = tracked.tables[group]
            size = self._sizes[group]
            num_full = min(num_tokens // size, num_hashes // self._strides[group], len(table))
            for index in range(tracked.num_seen[group], num_full):
                block_hash = self._hash(request, group, index)
                if table[index] and (slot := self._store.reserve(group, block_hash)) is not None:
                    self._pending.saves.append(
                        Place(group, table[index], slot, block_hash, index * size)
                    )
            tracked.num_seen[group] = max(tracked.num_seen[group], num_full)
        seen = [(tracked.num_seen[group] + 1) * self._sizes[group] for group in self._tokens]
        tracked.wake_at = min(seen, default=0)
        places = self._pending.saves[num_planned:]
        if places:
            self.saved(request, places)
        return bool(places)

    def _save_states(self, batch: Batch) -> None:
        """Plan to save the states with which the batch's rows go on where a prefix may end. After
        wrong drafts a row goes on there twice, and only the first time its states are those of the
        place."""
        starts = batch.num_computed_tokens
        is_end = (starts > 0) & (starts % self.alignment == 0)
        new = {request.row for request in batch.new}
        sources = {
            (group, destination): source
            for group, source, destination in (batch.copy_blocks.tolist() if new else ())
        }
        for row, start in zip(batch.rows[is_end].tolist(), starts[is_end].tolist(), strict=True):
            tracked = self._by_row.get(row)
            if tracked is None or start <= tracked.state_at:
                continue
            tracked.state_at = start
            blocks: dict[int, int | None] = {g: tracked.tables[g][0] for g in self._states}
            if row in new:  # it has only those that are copied for it
                blocks = {group: sources.get((group, b)) for group, b in blocks.items() if b}
            self._save_state(tracked, start, blocks)

    def _save_state(self, tracked: _Tracked, start: int, blocks: Mapping[int, int | None]) -> None:
        """Plan to save the states after `start` tokens, which are in `blocks` by group. A load
        within a step in flight may still fail, and then they are wrong."""
        request = tracked.request
        is_known = start <= len(request.block_hashes) * self._hash_size
        is_certain = request.num_confirmed_tokens >= tracked.start
        if not (is_known and is_certain and self.saves(request)) or None in blocks.values():
            return
        places = []
        for group, block_id in blocks.items():
            block_hash = self._hash(request, group, start // self._sizes[group] - 1)
            slot = self._store.reserve(group, block_hash)
            if slot is not None and block_id is not None:
                places.append(Place(group, block_id, slot, block_hash, start))
        tracked.saved_at = start
        self._pending.saves += places
        if places:
            self.saved(request, places)

    def released(
        self,
        request: RequestView,
        blocks: BlockView,
        why: Literal["finished", "aborted", "preempted"],
    ) -> Release:
        release = self._release(request, why)
        self._tracked.pop(request.key, None)
        return release

    def _release(self, request: RequestView, why: str) -> Release:
        tracked = self._tracked.get(request.key)
        self._by_row = {row: other for row, other in self._by_row.items() if other is not tracked}
        if request.key in self._loading:  # the load may still be writing
            return Release(later=True)
        if tracked is None or why != "finished" or not self._saves:
            return Release()
        later = self._save_full(tracked)
        if later:
            self._pending.released.append(request.key)
        is_asked = (request.kv_transfer_params or {}).get("do_remote_decode") is True
        return Release(later, self.parameters_of(request) if is_asked else None)

    def full_tokens(self, request: RequestView) -> int:
        """Return how many tokens of a tracked request another engine can load: those in blocks that
        are full in all groups, up to the last saved states."""
        if self._states:
            return self._tracked[request.key].saved_at
        num_tokens = min(request.num_confirmed_tokens, request.num_tokens)
        num_hashed = len(request.block_hashes) * self._hash_size
        return min(num_tokens, num_hashed) // self.alignment * self.alignment

    def parameters_of(self, request: RequestView) -> dict[str, Any]:
        """Return what another engine needs to find the blocks of a request whose answer is
        complete."""
        return {"do_remote_prefill": True, "do_remote_decode": False}

    def update(self, reports: Sequence[TransferReport]) -> None:
        for report in reports:
            for key in (*report.loaded, *report.failed):
                self._loading.pop(key, None)

    def reset(self) -> None:
        """Keep the store: its blocks are right as long as the engine has the same identity."""
