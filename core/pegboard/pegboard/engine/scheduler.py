"""Decides what each step computes, and applies its result. There is no prefill phase and no decode
phase: every step moves `num_computed_tokens` of some requests towards their known tokens.

    schedule():  1. running requests, in order: each computes its missing tokens, within the token
                    budget; when blocks run out, the policy names a victim, which loses its blocks
                    and recomputes later
                 2. if no request was preempted: waiting requests, in the policy's order
                    (admission.py)
                 3. the schedule becomes a Batch (batch_builder.py)
    update():    tokens are appended and full blocks become findable; then the requests that have
                 ended give up what they hold

Several steps may be in flight. Each sampling step adds one token that is not known yet. While a
request has drafts, no step is scheduled ahead, because the next step depends on how many of them
are accepted. If the workers leave drafts on the device (`Limits.drafts_ahead`), the next step is
scheduled as if all drafts were right, and the device computes it where the right ones end. With
pipeline stages, a request waits for each of its tokens, because the first stage
gets it from here, and the requests are divided among as many steps as there are stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from pegboard.config.limits import Limits
from pegboard.data.batch import Batch, StepOutput
from pegboard.data.request import RequestDelta
from pegboard.engine.admission import Admission
from pegboard.engine.batch_builder import Entry, StepSchedule, build_batch, share_of_stage
from pegboard.engine.encoder_cache import EncoderCache
from pegboard.engine.gates import Gate
from pegboard.engine.grammar.grammars import Grammars
from pegboard.engine.kv.request_blocks import Copy, NewBlocks
from pegboard.engine.live_requests import LiveRequests
from pegboard.engine.loras import LoRASlots
from pegboard.engine.metrics.step import StepMetrics
from pegboard.engine.prefill_pacing import PrefillPacing
from pegboard.engine.requests import BAD_TOKENS, Request
from pegboard.engine.transfers import Transfers
from pegboard.interfaces.scheduling_policy import RequestStatus, StepBudget, StepLoad


@dataclass(slots=True)
class InFlight:
    """A submitted step. drafts: row → draft tokens that it verifies. copies: the block copies that
    it runs. load: the load when it was scheduled. num_prefill_tokens: tokens that it computes in
    addition to one per row."""

    drafts: dict[int, list[int]]
    copies: list[Copy]
    load: StepLoad
    num_prefill_tokens: int


class Ended(NamedTuple):
    """A completion that a step has ended, its last delta, and its finish reason. is_aborted: it has
    no result."""

    request: Request
    delta: RequestDelta
    reason: str
    is_aborted: bool = False


class Scheduler:
    """loras: None = LoRA is off. encoder: None = the model has only text.

    The engine's thread calls `schedule` before a step is submitted, and `update` when its result
    has arrived, in the same order."""

    def __init__(
        self,
        limits: Limits,
        live: LiveRequests,
        admission: Admission,
        gates: Sequence[Gate],
        grammars: Grammars,
        loras: LoRASlots | None,
        encoder: EncoderCache | None,
        metrics: StepMetrics,
    ) -> None:
        self._limits = limits
        self._live = live
        self._kv = live.kv
        self._admission = admission
        self._gates = gates
        self._grammars = grammars
        self._loras = loras
        self._encoder = encoder
        self._metrics = metrics
        self._transfers = Transfers(limits, live)
        self._num_steps = 0
        self._pacing = PrefillPacing(limits.target_itl_s) if limits.target_itl_s else None
        self._steps: dict[int, InFlight] = {}
        self.is_paused = False

    def schedule(self, *, is_needed: bool = False) -> Batch | None:
        """Return the next step's batch, or None if nothing can run now. The batch is empty if only
        KV transfers are open, for whose reports the step polls, or if other engines need it
        (is_needed)."""
        for gate in self._gates:
            gate.begin(is_idle=not self._steps)
        if self._steps and any(request.draft_token_ids for request in self._live.running):
            return None
        load = self._load()
        max_rows = share_of_stage(self._limits, self._live, len(self._steps))
        budget = self._budget(load)
        schedule = StepSchedule(
            self._limits,
            budget,
            self._kv.checkpoint_every,
            max_rows,
            self._encoder,
            ends_early=bool(self._live.connectors),
        )
        if not self.is_paused:
            self._schedule_running(schedule)
            if not schedule.has_preempted:
                self._admission.admit(schedule)
        if not schedule.entries and (self._steps or not (is_needed or self._live.is_transferring)):
            return None
        batch, drafts, copies = build_batch(
            self._num_steps, schedule, self._live, self._limits, self._loras, self._encoder
        )
        self._num_steps += 1
        num_prefill_tokens = int(batch.num_scheduled_tokens.sum()) - len(batch.rows)
        self._steps[batch.step] = InFlight(drafts, copies, load, num_prefill_tokens)
        return batch

    def _budget(self, load: StepLoad) -> StepBudget:
        most = self._limits.max_num_batched_tokens
        budget = self._live.waiting.budget(load)
        budget = budget if budget.max_tokens <= most else replace(budget, max_tokens=most)
        return budget if self._pacing is None else self._pacing.limit(budget, load)

    def pause(self, is_paused: bool) -> None:
        """Stop or go on computing. A paused scheduler's steps only poll for KV transfers."""
        self.is_paused = is_paused

    def drafts(self, step: int) -> dict[int, list[int]]:
        """Return row → the draft tokens that a submitted step verifies."""
        return self._steps[step].drafts

    def _load(self) -> StepLoad:
        running = self._live.running
        num_decodes = sum(
            1
            for request in running
            if request.num_computed_tokens >= len(request.all_token_ids) - 1
        )
        return StepLoad(num_decodes, len(self._live.waiting))

    # --- schedule: running requests ---------------------------------------------------------------

    def _schedule_running(self, schedule: StepSchedule) -> None:
        running = self._live.running
        index = 0
        while index < len(running) and schedule.has_room:
            request = running[index]
            num_before = len(running)
            self._schedule_one(request, schedule)
            if len(running) == num_before:
                index += 1
            elif request.status is RequestStatus.RUNNING:
                index = running.index(request) + 1  # victims may have been before it in the list
            else:
                break  # it was the victim itself; the next step uses its blocks

    def _schedule_one(self, request: Request, schedule: StepSchedule) -> None:
        """Schedule one running request, if it has tokens to compute and there are blocks for
        them."""
        num_known, num_drafts = self._missing(request)
        if num_known == 0:
            return
        num_known, num_drafts = self._shorten(request, num_known, num_drafts, schedule)
        if num_known == 0:
            return
        if self._kv.checkpoint_every:
            self._kv.checkpoint(request, request.num_computed_tokens)
        computed = request.num_computed_tokens
        new_blocks = self._find_blocks(request, computed + num_known + num_drafts, schedule)
        if new_blocks is None:
            return
        samples = computed + num_known >= len(request.all_token_ids)
        schedule.put(request, Entry(num_known + num_drafts, num_drafts, samples, new_blocks))

    def _missing(self, request: Request) -> tuple[int, int]:
        """Return (number of known tokens without KV, number of drafts to verify after them). It is
        (0, 0) if the request must wait for its own result, or if the steps in flight are certain to
        end it."""
        computed = request.num_computed_tokens
        num_tokens = len(request.all_token_ids)
        if computed < num_tokens - 1:
            return num_tokens - computed, 0
        limits = self._limits
        num_pending = computed - num_tokens + 1  # outputs in flight, if all their drafts are right
        room = request.output_room(limits.max_model_len) - num_pending
        if num_pending and (room <= 0 or limits.num_stages > 1):
            return 0, 0
        if limits.drafts_ahead and request.grammar is None:
            return 1, min(request.num_drafts, room - 1)
        num_drafts = 0 if num_pending else len(request.draft_token_ids)
        return 1, max(0, min(num_drafts, limits.max_drafts, room - 1)) if num_drafts else 0

    def _shorten(
        self, request: Request, num_known: int, num_drafts: int, schedule: StepSchedule
    ) -> tuple[int, int]:
        """Limit both numbers to the rest of the step's budget. The grammar may trim the drafts
        further."""
        in_items = bool(request.media) and request.num_computed_tokens < request.num_prompt_tokens
        if num_known > 1 or in_items:
            return schedule.chunk(request, num_known), num_drafts
        if num_drafts:
            num_drafts = min(num_drafts, schedule.tokens_left - 1)
        if num_drafts and request.grammar is not None:
            wanted = request.draft_token_ids[:num_drafts]
            num_drafts = len(self._grammars.trim(request, wanted))
        return 1, num_drafts

    def _find_blocks(
        self, request: Request, num_tokens: int, schedule: StepSchedule
    ) -> NewBlocks | None:
        """Return new blocks for `num_tokens` tokens, taken from victims if there is no other way.
        Return None if the request must wait."""
        live = self._live
        while (new_blocks := self._kv.allocate(request, num_tokens)) is None:
            if request.num_waiting_children and self._kv.stop_keeping(request):
                continue
            if live.rows.is_draining:
                # draining requests will release blocks soon, so no more victims are needed
                return None
            victim = live.waiting.victim(live.running, request)
            if (victim is None or victim is request) and live.reclaim(request):
                continue
            if victim is None:
                return None
            schedule.withdraw(victim)
            schedule.has_preempted = True
            live.preempt(victim)
            if victim is request:
                return None
        return new_blocks

    # --- update -----------------------------------------------------------------------------------

    def update(self, batch: Batch, output: StepOutput) -> None:
        """Apply the results to the requests of the step. Results for rows that their request has
        left meanwhile are dropped. Requests that have ended give up what they hold at the end."""
        self._close(batch, output)
        if output.transfers:
            self._transfers.take(output.transfers)
        ended: list[Ended] = []
        places = {row: place for place, row in enumerate(output.rows.tolist())}
        token_ids = output.token_ids.lists()
        drafts = output.draft_token_ids.lists() if output.draft_token_ids is not None else None
        flat = output.token_ids.flat
        vocab_size = self._limits.vocab_size
        is_sound = not len(flat) or (flat.min() >= 0 and flat.max() < vocab_size)
        now_s = self._live.clock()
        columns = (batch.rows, batch.num_scheduled_tokens, batch.num_draft_tokens)
        for row, num_tokens, num_drafts in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            request = self._live.rows.owners[row]
            assert request is not None, f"row {row} was freed while step {batch.step} held it"
            request.num_in_flight_steps -= 1
            request.num_in_flight_tokens -= num_tokens + request.num_loading_tokens
            request.num_loading_tokens = 0
            if request.status is not RequestStatus.RUNNING:
                if not request.num_in_flight_steps:
                    self._live.vacate(request)
                continue
            place = places.get(row)
            if place is None:  # part of a prompt
                self._commit(request)
                continue
            if output.embeddings is not None:
                ended.append(self._take_vector(request, output.embeddings[place], now_s))
                continue
            tokens = token_ids[place]
            if not is_sound and not all(0 <= token < vocab_size for token in tokens):
                delta = request.failed(BAD_TOKENS.format(tokens))
                ended.append(Ended(request, delta, "error", is_aborted=True))
                continue
            if len(tokens) <= num_drafts:
                # there is no state after some of the tokens of a step, so all are computed again
                num_kept = 0 if self._kv.has_states else len(tokens)
                request.num_computed_tokens -= num_drafts + 1 - num_kept
            end = self._take_tokens(request, tokens, output, place, now_s)
            if end is not None:
                ended.append(end)
            request.draft_token_ids = self._known_drafts(request, drafts, place)
            if num_drafts:
                self._metrics.count_drafts(num_drafts, len(tokens) - 1)
        for end in ended:
            self._live.finish(end.request, end.delta, end.reason, is_aborted=end.is_aborted)

    def _close(self, batch: Batch, output: StepOutput) -> None:
        """End a step: release its copies, and report its times to the policy, the pacing and the
        metrics."""
        step = self._steps.pop(batch.step)
        self._kv.copies_done(step.copies)
        self._live.waiting.observe(step.load, output.times)
        if self._pacing is not None:
            self._pacing.observe(step.num_prefill_tokens, output.times.total_s)
        if batch.num_rows or batch.wave is None:
            self._metrics.step(batch, output.times, self._live.rows.owners)

    def _take_vector(self, request: Request, vector: np.ndarray, now_s: float) -> Ended:
        self._commit(request)
        self._live.count("external_prefix_cache_hits_total", request.num_external_tokens)
        self._metrics.tokens(request, 0, now_s)
        return Ended(request, *request.embedded(vector))

    def _take_tokens(
        self, request: Request, token_ids: list[int], output: StepOutput, place: int, now_s: float
    ) -> Ended | None:
        is_first = not request.output_token_ids
        tokens, reason = request.append_until_stop(token_ids, self._limits.max_model_len)
        self._commit(request)
        delta = RequestDelta(request_id=request.request_id, index=request.index, token_ids=tokens)
        if is_first:
            delta.num_cached_tokens = request.num_cached_tokens
            self._live.count("external_prefix_cache_hits_total", request.num_external_tokens)
            if output.prompt_logprobs and request.row in output.prompt_logprobs:
                positions = output.prompt_logprobs[request.row].positions()
                delta.prompt_logprobs = msgspec.Raw(msgspec.msgpack.encode(positions))
        if output.logprobs is not None and (logprobs := output.logprobs[place]) is not None:
            delta.logprobs = logprobs.positions()[: len(tokens)]
        self._metrics.tokens(request, len(tokens), now_s)
        if request.grammar is not None:
            reason = self._grammars.advance(request, tokens, delta, reason)
        if reason is not None:
            return Ended(request, delta, reason)
        self._live.emit(delta)
        return None

    def _known_drafts(
        self, request: Request, drafts: list[list[int]] | None, place: int
    ) -> list[int]:
        """Return the drafts of a request, if it needs to know them."""
        if drafts is None:
            return []
        if not self._limits.drafts_ahead:
            return drafts[place]
        return drafts[place][: request.num_drafts] if request.grammar is not None else []

    def _commit(self, request: Request) -> None:
        """Commit the tokens that no step in flight can still change."""
        self._kv.commit(request, min(request.num_confirmed_tokens, len(request.all_token_ids)))
