"""Decides each step's work. There is no prefill phase and no decode phase: `num_computed_tokens` chases the known tokens.

    1. running requests, in order: each gets the tokens it lacks, within the token budget; when blocks run out, the policy names
       a victim, which gives its blocks back and recomputes later
    2. if nobody was preempted: waiting requests, in the policy's order (admission.py)
    3. the plan becomes a Batch

Several steps may be in flight. Each sampling step adds one token that is not known yet, so a request's known tokens are at
least `num_computed_tokens + 1` once its prompt is done. A row with a sampling step in flight is scheduled ahead only when
drafts are off: how many drafts were accepted decides what comes next.
"""

from __future__ import annotations

from dataclasses import dataclass

from pegboard.config.limits import Limits
from pegboard.data.batch import Batch, StepTimes
from pegboard.data.request import Request, RequestStatus
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.admission import Admission
from pegboard.engine.batch_builder import BatchBuilder
from pegboard.engine.blamed import BlamedPolicy
from pegboard.engine.grammar.grammars import Grammars
from pegboard.engine.kv.cache import Copy, KVCache, NewBlocks
from pegboard.engine.kv.connectors import Transfers
from pegboard.engine.media_plan import MediaPlanner
from pegboard.engine.roster import Roster
from pegboard.engine.step_plan import Entry, StepPlan
from pegboard.engine.step_size import StepSize
from pegboard.interfaces.scheduling_policy import StepLoad


@dataclass(slots=True)
class InFlight:
    """What the engine must remember of a submitted step: row → draft tokens it verifies, copies it runs, the load it met, tokens
    it computes beyond one a row."""

    drafts: dict[int, list[int]]
    copies: list[Copy]
    load: StepLoad
    num_prefill_tokens: int


class Scheduler:
    """Called from the engine's thread: `schedule` before a step is submitted, `close` when its result is in."""

    def __init__(
        self,
        limits: Limits,
        roster: Roster,
        kv: KVCache,
        policy: BlamedPolicy,
        transfers: Transfers,
        media: MediaPlanner,
        grammars: Grammars | None,
    ) -> None:
        self._limits = limits
        self._roster = roster
        self._kv = kv
        self._policy = policy
        self._transfers = transfers
        self._media = media
        self._grammars = grammars
        self._admission = Admission(limits, roster, kv, policy, transfers, media, grammars)
        self._builder = BatchBuilder(limits, roster, kv, transfers)
        self._size = StepSize(limits.target_itl_s) if limits.target_itl_s else None
        self._steps: dict[int, InFlight] = {}
        self.prefix_queries = self._admission.prefix_queries

    def schedule(self) -> Batch | None:
        """The next step's batch; None when nothing can run now. An empty batch is a poll: only a step brings the reports that
        open KV transfers wait for."""
        load = self._load()
        limits = self._limits
        encoder_tokens = min(limits.encoder_cache_tokens, limits.max_encoder_tokens)
        budget = self._policy.budget(load)
        if self._size is not None:
            budget = self._size.limit(budget, load)
        plan = StepPlan(budget, encoder_tokens)
        self._plan_running(plan)
        if not plan.has_preempted:
            self._admission.run(plan)
        if not plan.entries and (self._steps or not self._must_poll()):
            return None
        batch, drafts, copies = self._builder.build(plan)
        num_prefill_tokens = int(batch.num_scheduled_tokens.sum()) - len(batch.rows)
        self._steps[batch.step] = InFlight(drafts, copies, load, num_prefill_tokens)
        return batch

    def drafts(self, step: int) -> dict[int, list[int]]:
        """Row → the draft tokens a submitted step verifies."""
        return self._steps[step].drafts

    def close(self, step: int, times: StepTimes) -> None:
        """The step's result is in: its copies are done, and its times are something to learn from."""
        record = self._steps.pop(step)
        self._kv.copies_done(record.copies)
        self._policy.observe(record.load, times)
        if self._size is not None:
            self._size.observe(record.num_prefill_tokens, times.total_s)

    def _must_poll(self) -> bool:
        return bool(self._roster.loading) or self._transfers.has_open

    def _load(self) -> StepLoad:
        running = self._roster.running
        num_decodes = sum(1 for request in running if request.num_computed_tokens >= len(request.all_token_ids) - 1)
        return StepLoad(num_decodes, len(running) - num_decodes, self._roster.num_waiting, self._kv.usage)

    # --- running requests ---------------------------------------------------------------------------------------------------

    def _plan_running(self, plan: StepPlan) -> None:
        running = self._roster.running
        index = 0
        while index < len(running) and plan.tokens_left > 0:
            request, num_before = running[index], len(running)
            self._plan_one(request, plan)
            if len(running) == num_before:
                index += 1
            elif request.status is RequestStatus.RUNNING:
                index = running.index(request) + 1  # victims may have stood before it
            else:
                break  # it had the weakest claim itself: what it gave back is for the next step

    def _plan_one(self, request: Request, plan: StepPlan) -> None:
        """Schedule one running request, if it has something to compute and blocks can be found."""
        num_known, num_drafts = self._missing(request)
        if num_known == 0:
            return
        num_known, num_drafts, encode = self._shorten(request, num_known, num_drafts, plan)
        if num_known == 0:
            return
        if self._kv.checkpoint_every:
            self._kv.checkpoint(request, request.num_computed_tokens)
        computed = request.num_computed_tokens
        new_blocks = self._find_blocks(request, computed + num_known + num_drafts, plan)
        if new_blocks is None:
            return
        if encode or request.media:
            self._media.book(request, num_known, encode, plan)
        samples = computed + num_known >= len(request.all_token_ids)
        plan.put(request, Entry(num_known + num_drafts, num_drafts, samples, new_blocks))

    def _missing(self, request: Request) -> tuple[int, int]:
        """(known tokens without KV, drafts to verify behind them); (0, 0) when the request must wait for its own result, or
        when what is in flight is certain to end it."""
        computed, num_tokens = request.num_computed_tokens, len(request.all_token_ids)
        if computed < num_tokens - 1:
            return num_tokens - computed, 0
        limits = self._limits
        if computed >= num_tokens:  # outputs are in flight: 1 per sampling step
            num_pending = computed - num_tokens + 1
            room = self._output_room(request) - num_pending
            return (1, 0) if room > 0 and limits.max_drafts == 0 else (0, 0)
        drafts = request.draft_token_ids
        if not drafts or request.num_in_flight_steps:
            return 1, 0
        return 1, max(0, min(len(drafts), limits.max_drafts, self._output_room(request) - 1))

    def _output_room(self, request: Request) -> int:
        """Tokens that may still be sampled before max_tokens or max_model_len ends the request; none when it is pooled."""
        params = request.params
        if not isinstance(params, SamplingParams):
            return 0
        room = self._limits.max_model_len - len(request.all_token_ids)
        return room if params.max_tokens is None else min(room, params.max_tokens - len(request.output_token_ids))

    def _shorten(self, request: Request, num_known: int, num_drafts: int, plan: StepPlan) -> tuple[int, int, list[int]]:
        """Fit the wish into what is left of the step. Drafts are cut by the budget and by the grammar."""
        if num_known == 1:
            num_drafts = min(num_drafts, plan.tokens_left - 1)
            if num_drafts and request.grammar is not None and self._grammars is not None:
                wanted = request.draft_token_ids[:num_drafts]
                num_drafts = len(self._grammars.trim(request, wanted))
                plan.has_trimmed_drafts |= num_drafts < len(wanted)
            if not request.media:
                return 1, num_drafts, []
        num_known = self._admission.chunk(request, num_known, plan)
        num_known, encode = self._media.fit(request, num_known, plan) if request.media else (num_known, [])
        return num_known, num_drafts, encode

    def _find_blocks(self, request: Request, num_tokens: int, plan: StepPlan) -> NewBlocks | None:
        """Blocks for `num_tokens` tokens, taken from victims if there is no other way. None = the request waits."""
        num_tokens = min(num_tokens + self._limits.num_lookahead_tokens, self._limits.max_model_len)
        while (new_blocks := self._kv.allocate(request, num_tokens)) is None:
            if request.num_waiting_children and self._kv.stop_keeping(request):
                continue
            if self._roster.draining:
                return None  # blocks come back as soon as the steps in flight are done: no need to take more
            victim = self._policy.victim(tuple(self._roster.running), request)
            if (victim is None or victim is request) and self._roster.reclaim(request):
                continue
            if victim is None or not plan.withdraw(victim):
                return None
            plan.has_preempted = True
            self._roster.preempt(victim)
            if victim is request:
                return None
        return new_blocks
