"""Turns a finished plan into the Batch the workers get, and books the scheduled tokens on the requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import msgspec
import numpy as np

from pegboard.config.limits import Limits
from pegboard.data.batch import CSR, Batch, BlockDelta, NewRequest
from pegboard.data.request import Request
from pegboard.data.request_parts import MediaRef
from pegboard.engine.kv.cache import Copy, KVCache
from pegboard.engine.kv.connectors import Transfers
from pegboard.engine.roster import Roster
from pegboard.engine.step_plan import Entry, StepPlan

Item = tuple[Request, Entry]


class BatchBuilder:
    """Numbers the steps. The batch shares no mutable state with the engine: it may be computed much later."""

    def __init__(self, limits: Limits, roster: Roster, kv: KVCache, transfers: Transfers) -> None:
        self._limits = limits
        self._roster = roster
        self._kv = kv
        self._transfers = transfers
        self._step = 0

    def build(self, plan: StepPlan) -> tuple[Batch, dict[int, list[int]], list[Copy]]:
        """The batch, row → draft tokens it verifies, and the block copies it runs."""
        items = self._in_order(plan)
        copies = self._kv.take_copies()
        drafts = {cast(int, r.row): r.draft_token_ids[: e.num_drafts] for r, e in items if e.num_drafts}
        new = [self._new_request(request, plan) for request, entry in items if entry.is_new]
        roster, limits = self._roster, self._limits
        batch = Batch(
            step=self._step,
            rows=_ints(request.row for request, _ in items),
            num_scheduled_tokens=_ints(entry.num_tokens for _, entry in items),
            num_computed_tokens=_ints(request.num_computed_tokens for request, _ in items),
            num_draft_tokens=_ints(entry.num_drafts for _, entry in items),
            samples=np.array([entry.samples for _, entry in items], bool),
            new=new,
            removed_rows=_ints(roster.removed_rows),
            new_blocks=_block_delta(items),
            copy_blocks=np.array(copies, np.int32).reshape(-1, 3),
            needs_masks=any(entry.samples and request.grammar is not None for request, entry in items),
            encode=np.array([(request.row, index) for request, index in plan.encode], np.int32) if plan.encode else None,
            free_media=roster.encoder_cache.take_freed(),
            lora_loads=roster.loras.take_loads(),
        )
        if plan.has_trimmed_drafts:
            batch.draft_token_ids = CSR.of([request.draft_token_ids[: entry.num_drafts] for request, entry in items])
        if limits.max_loras:
            batch.lora_slots = _ints(roster.loras.slot_of(request.lora) for request, _ in items)
        roster.removed_rows = []
        self._book(items)
        if self._transfers.is_on:
            batch.connector = self._transfers.plan(batch)
        self._step += 1
        return batch, drafts, copies

    def _in_order(self, plan: StepPlan) -> list[Item]:
        """Decodes (and other short rows) first, then prefills."""
        short = 1 + self._limits.max_drafts
        first = [item for item in plan.entries.items() if item[1].num_tokens <= short]
        if len(first) == len(plan.entries):
            return first
        return first + [item for item in plan.entries.items() if item[1].num_tokens > short]

    def _book(self, items: list[Item]) -> None:
        """From now on these tokens count as computed, pending the step's result."""
        for request, entry in items:
            request.num_computed_tokens += entry.num_tokens
            request.num_in_flight_tokens += entry.num_tokens
            request.num_in_flight_steps += 1

    def _new_request(self, request: Request, plan: StepPlan) -> NewRequest:
        token_ids = np.array(request.all_token_ids, np.int32)
        if request.prompt_embeds is not None:
            token_ids[: request.num_prompt_tokens] = -1
        assert request.row is not None
        return NewRequest(
            row=request.row,
            request_id=request.key,
            token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            params=request.params,
            seed=request.seed,
            block_ids=tuple(np.array(table, np.int32) for table in self._kv.tables(request)),
            prompt_embeds=request.prompt_embeds,
            media=self._media(request, plan),
            parent_row=plan.parents.get(request),
        )

    def _media(self, request: Request, plan: StepPlan) -> tuple[MediaRef, ...]:
        """Without the data of items that the worker has, or gets in this very step from another row."""
        if not request.media:
            return ()
        encoded_here = {index for owner, index in plan.encode if owner is request}
        cache = self._roster.encoder_cache
        return tuple(
            msgspec.structs.replace(item, data=None) if index not in encoded_here and cache.is_held(item, request.key) else item
            for index, item in enumerate(request.media)
        )


def _ints(values: Iterable[int | None]) -> np.ndarray:
    return np.array(list(values), np.int32)


def _block_delta(items: list[Item]) -> BlockDelta:
    """Blocks appended to tables the worker has already."""
    rows, groups, ids = [], [], []
    for request, entry in items:
        if entry.is_new:
            continue
        for group, block_ids in enumerate(entry.new_blocks):
            if block_ids:
                rows.append(request.row)
                groups.append(group)
                ids.append(block_ids)
    return BlockDelta(_ints(rows), _ints(groups), CSR.of(ids)) if rows else BlockDelta.empty()
