"""The schedule of a step, which says how many tokens each request computes, and the `Batch` for the
workers that it becomes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from pegboard.config.limits import Limits
from pegboard.data.batch import CSR, Batch, BlockDelta, NewRequest
from pegboard.engine.encoder_cache import EncoderCache
from pegboard.engine.kv.request_blocks import Copy, NewBlocks
from pegboard.engine.live_requests import LiveRequests
from pegboard.engine.loras import LoRASlots
from pegboard.engine.requests import Request
from pegboard.engine.whole_spans import cut
from pegboard.interfaces.scheduling_policy import StepBudget


class Entry(NamedTuple):
    """One request's part of a step. num_tokens: tokens to compute, including drafts. samples: the
    step reaches the request's last known token, so a new token is sampled. new_blocks: the blocks
    appended to its tables. is_new: the worker gets the whole request."""

    num_tokens: int
    num_drafts: int
    samples: bool
    new_blocks: NewBlocks
    is_new: bool = False


class StepSchedule:
    """Collects the entries of a step. A prefill is *partial* if its prompt does not end in this
    step. It is *long* if the prompt is longer than the chunk limit. checkpoint_every: see
    `KVCache`. max_rows: how many requests it may have. encoder: None = the model has only text.
    ends_early: states are also kept at the last place before the end of a prompt, where another
    engine begins that has the same prompt."""

    def __init__(
        self,
        limits: Limits,
        budget: StepBudget,
        checkpoint_every: int,
        max_rows: int,
        encoder: EncoderCache | None = None,
        *,
        ends_early: bool = False,
    ) -> None:
        self.budget = budget
        self._most = limits.max_num_batched_tokens
        self._can_chunk = limits.enable_chunked_prefill
        self._max_chunk = min(max(1, budget.max_chunk), limits.long_prefill_token_threshold)
        self._every = checkpoint_every
        self._ends_early = ends_early
        self.tokens_left = budget.max_tokens
        self._max_rows = max_rows
        self._encoder = encoder
        self.entries: dict[Request, Entry] = {}
        self.has_preempted = False
        self._num_partial = 0
        self._num_long_partial = 0

    @property
    def has_room(self) -> bool:
        """Whether one more request fits in the step."""
        return self.tokens_left > 0 and len(self.entries) < self._max_rows

    def put(self, request: Request, entry: Entry) -> None:
        """Schedule the request."""
        self.entries[request] = entry
        self._count(request, entry, 1)

    def withdraw(self, request: Request) -> None:
        """Remove a request that lost its blocks from the step, if it is scheduled."""
        entry = self.entries.pop(request, None)
        if entry is not None:
            self._count(request, entry, -1)

    def chunk(self, request: Request, num_missing: int) -> int:
        """Return how many of the missing tokens this step computes, within the budget and the chunk
        limit. A chunk ends before an item that cannot be encoded now, and where a state can be
        cached, if there is such a place in it. It never ends inside tokens that are computed as a
        whole; a step takes them beyond these limits, if it has room for their number."""
        num_tokens = min(num_missing, self.tokens_left)
        if self._can_chunk:
            num_tokens = min(num_tokens, self._max_chunk)
        computed = request.num_computed_tokens
        if request.whole:
            most = self._most - self.budget.max_tokens + self.tokens_left
            num_tokens = cut(request.whole, computed, num_tokens, most)
        if request.media and self._encoder is not None:
            num_tokens = self._encoder.limit(request, num_tokens)
            num_tokens = cut(request.whole, computed, num_tokens)
        if self._every and num_tokens > 1:
            stop = computed + num_tokens
            is_early = self._ends_early and stop == request.num_tokens
            border = (stop - is_early) // self._every * self._every
            if border > computed:
                num_tokens = cut(request.whole, computed, border - computed) or num_tokens
        return num_tokens

    def allows_partial(self, request: Request) -> bool:
        """Return whether one more prompt may be computed in chunks."""
        if self._is_long(request) and self._num_long_partial >= self.budget.max_long_prefills:
            return False
        return self._num_partial < self.budget.max_prefills

    def _count(self, request: Request, entry: Entry, sign: int) -> None:
        self.tokens_left -= sign * entry.num_tokens
        if not entry.samples:
            self._num_partial += sign
            self._num_long_partial += sign * self._is_long(request)

    def _is_long(self, request: Request) -> bool:
        return request.num_prompt_tokens > self.budget.max_chunk


def share_of_stage(limits: Limits, live: LiveRequests, num_steps: int) -> int:
    """Return how many requests the next step may have, while `num_steps` are in flight. The
    pipeline stages that have no step yet share the requests that are in none."""
    if limits.num_stages == 1:
        return limits.max_num_seqs
    waiting = min(len(live.waiting), limits.max_num_seqs - len(live.running))
    num_open = waiting + sum(not request.num_in_flight_steps for request in live.running)
    return max(1, -(-num_open // max(1, limits.num_stages - num_steps)))


Item = tuple[Request, Entry]


def build_batch(
    step: int,
    schedule: StepSchedule,
    live: LiveRequests,
    limits: Limits,
    loras: LoRASlots | None,
    encoder: EncoderCache | None,
) -> tuple[Batch, dict[int, list[int]], list[Copy]]:
    """Return the batch of the step, the draft tokens that it verifies by row, and the block copies
    that it runs. From now on the scheduled tokens count as computed. A batch shares no mutable
    state with the engine, because it may be computed much later."""
    items = _in_order(schedule, 1 + limits.max_drafts)
    copies = live.kv.take_copies()
    drafts = {
        row: r.draft_token_ids[: e.num_drafts]
        for r, e in items
        if e.num_drafts and (row := r.row) is not None
    }
    batch = Batch(
        step=step,
        rows=_ints(request.row for request, _ in items),
        num_scheduled_tokens=_ints(entry.num_tokens for _, entry in items),
        num_computed_tokens=_ints(request.num_computed_tokens for request, _ in items),
        num_draft_tokens=_ints(entry.num_drafts for _, entry in items),
        samples=np.array([entry.samples for _, entry in items], bool),
        new=[_new_request(request, entry) for request, entry in items if entry.is_new],
        removed_rows=_ints(live.rows.take_removed()),
        new_blocks=_block_delta(items),
        copy_blocks=np.array(copies, np.int32).reshape(-1, 3),
        needs_masks=any(entry.samples and request.grammar is not None for request, entry in items),
    )
    if limits.num_stages > 1:
        batch.first_token_ids = _ints(
            request.all_token_ids[request.num_computed_tokens] for request, _ in items
        )
    if drafts and limits.num_stages > 1:
        batch.draft_token_ids = CSR.of(
            [request.draft_token_ids[: entry.num_drafts] for request, entry in items]
        )
    if loras is not None:
        batch.lora_slots = _ints(loras.slot_of(request) for request, _ in items)
    if encoder is not None:
        batch.encode, batch.forgotten = encoder.take()
    for request, entry in items:
        request.num_computed_tokens += entry.num_tokens
        request.num_in_flight_tokens += entry.num_tokens
        request.num_in_flight_steps += 1
    if limits.drafts_ahead:
        _promise_drafts(items, limits)
    batch.connector = live.connectors.plan(batch)
    return batch, drafts, copies


def _in_order(schedule: StepSchedule, short: int) -> list[Item]:
    """Return the entries in execution order: rows of at most `short` tokens first, then longer
    prefills."""
    first = [item for item in schedule.entries.items() if item[1].num_tokens <= short]
    if len(first) == len(schedule.entries):
        return first
    return first + [item for item in schedule.entries.items() if item[1].num_tokens > short]


def _promise_drafts(items: list[Item], limits: Limits) -> None:
    """Note how many drafts the requests have after the step. The workers propose so many."""
    longest = min(limits.max_model_len - 1, limits.max_draft_len)
    has_drafts = sum(entry.samples for _, entry in items) <= limits.max_draft_rows
    for request, entry in items:
        room = longest - request.num_computed_tokens - 1
        most = request.params.most_drafts
        most = limits.max_drafts if most is None else min(most, limits.max_drafts)
        request.num_drafts = max(0, min(most, room)) if has_drafts and entry.samples else 0


def _new_request(request: Request, entry: Entry) -> NewRequest:
    assert request.row is not None
    return NewRequest(
        row=request.row,
        request_id=request.key,
        token_ids=np.array(request.all_token_ids, np.int32),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        params=request.params,
        seed=request.seed,
        block_ids=tuple(np.array(table, np.int32) for table in entry.new_blocks),
        prompt_embeds=request.prompt_embeds,
        token_inputs=request.token_inputs,
        pooling=request.pooling,
        media=tuple(msgspec.structs.replace(item, arrays={}) for item in request.media),
        whole=request.whole,
    )


def _ints(values: Iterable[int | None]) -> np.ndarray:
    return np.array(list(values), np.int32)


def _block_delta(items: list[Item]) -> BlockDelta:
    """Return the blocks appended to the tables that the worker already has."""
    rows = []
    groups = []
    ids = []
    for request, entry in items:
        if entry.is_new:
            continue
        for group, block_ids in enumerate(entry.new_blocks):
            if block_ids:
                rows.append(request.row)
                groups.append(group)
                ids.append(block_ids)
    return BlockDelta(_ints(rows), _ints(groups), CSR.of(ids)) if rows else BlockDelta.empty()
