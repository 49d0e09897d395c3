"""Decides what each step computes, and applies its result. There is no prefill phase and no decode
phase: every step moves `num_computed_tokens` of some requests towards their known tokens.

    schedule():  1. running requests, in order: each computes its missing tokens, within the token
    budget; when blocks run out,
                    the policy names a victim, which loses its blocks and recomputes later
                 2. if no request was preempted: waiting requests, in the policy's order
                   (prefill.py)
                 3. the plan becomes a Batch (batch_builder.py)
    update():    tokens are appended, ended requests are found, full blocks become findable, and
    deltas are added to the queues

Several steps may be in flight. Each sampling step adds one token that is not known yet. While a
request has drafts, no step is scheduled ahead, because the next step depends on how many of them
are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from pegboard.config.limits import Limits
from pegboard.data.batch import Batch, Logprobs, StepOutput, TransferReport
from pegboard.data.request import PositionLogprobs, RequestDelta
from pegboard.engine.batch_builder import Entry, StepPlan, build_batch
from pegboard.engine.grammar.grammars import Grammars
from pegboard.engine.kv.cache import Copy, NewBlocks
from pegboard.engine.metrics.step import StepMetrics
from pegboard.engine.prefill import Prefill
from pegboard.engine.prefill_pacing import PrefillPacing
from pegboard.engine.queues import Queues
from pegboard.engine.requests import BAD_TOKENS, LOAD_FAILED, NO_TOKEN_LEFT, Request
from pegboard.errors import PluginFailure, expect
from pegboard.interfaces.scheduling_policy import RequestStatus, StepBudget, StepLoad


@dataclass(slots=True)
class InFlight:
    """A submitted step. drafts: row → draft tokens that it verifies. copies: the block copies that
    it runs. load: the load when it was planned. num_prefill_tokens: tokens that it computes in
    addition to one per row."""

    drafts: dict[int, list[int]]
    copies: list[Copy]
    load: StepLoad
    num_prefill_tokens: int


class Scheduler:
    """is_paused: no request computes anything; steps only poll for KV transfers.

    The engine's thread calls `schedule` before a step is submitted, and `update` when its result
    has arrived, in the same order."""

    def __init__(
        self, limits: Limits, queues: Queues, grammars: Grammars, metrics: StepMetrics
    ) -> None:
        self._limits = limits
        self._queues = queues
        self._kv = queues.kv
        self._grammars = grammars
        self._metrics = metrics
        self._prefill = Prefill(limits, queues, grammars)
        self._num_steps = 0
        self._pacing = PrefillPacing(limits.target_itl_s) if limits.target_itl_s else None
        self._steps: dict[int, InFlight] = {}
        self.is_paused = False

    def schedule(self) -> Batch | None:
        """Return the next step's batch, or None if nothing can run now. The batch is empty if only
        KV transfers are open: the step then polls for their reports."""
        self._queues.loras.begin_pass(is_idle=not self._steps)
        if self._steps and any(request.draft_token_ids for request in self._queues.running):
            return None
        load = self._load()
        policy = self._queues.policy
        most = self._limits.max_num_batched_tokens
        budget = expect(policy.budget(load), StepBudget, policy, "budget")
        budget = budget if budget.max_tokens <= most else replace(budget, max_tokens=most)
        if self._pacing is not None:
            budget = self._pacing.limit(budget, load)
        plan = StepPlan(budget)
        if not self.is_paused:
            self._plan_running(plan)
            if not plan.has_preempted:
                self._prefill.admit(plan)
        if not plan.entries and (self._steps or not self._queues.is_transferring):
            return None
        batch, drafts, copies = build_batch(self._num_steps, plan, self._queues, self._limits)
        self._num_steps += 1
        num_prefill_tokens = int(batch.num_scheduled_tokens.sum()) - len(batch.rows)
        self._steps[batch.step] = InFlight(drafts, copies, load, num_prefill_tokens)
        return batch

    def drafts(self, step: int) -> dict[int, list[int]]:
        """Return row → the draft tokens that a submitted step verifies."""
        return self._steps[step].drafts

    def _load(self) -> StepLoad:
        running = self._queues.running
        num_decodes = sum(
            1
            for request in running
            if request.num_computed_tokens >= len(request.all_token_ids) - 1
        )
        return StepLoad(num_decodes, self._queues.num_waiting)

    # --- schedule: running requests ---------------------------------------------------------------

    def _plan_running(self, plan: StepPlan) -> None:
        running = self._queues.running
        index = 0
        while index < len(running) and plan.tokens_left > 0:
            request = running[index]
            num_before = len(running)
            self._plan_one(request, plan)
            if len(running) == num_before:
                index += 1
            elif request.status is RequestStatus.RUNNING:
                index = running.index(request) + 1  # victims may have been before it in the list
            else:
                break  # it was the victim itself; the next step uses its blocks

    def _plan_one(self, request: Request, plan: StepPlan) -> None:
        """Schedule one running request, if it has tokens to compute and there are blocks for
        them."""
        num_known, num_drafts = self._missing(request)
        if num_known == 0:
            return
        num_known, num_drafts = self._shorten(request, num_known, num_drafts, plan)
        if num_known == 0:
            return
        if self._kv.checkpoint_every:
            self._kv.checkpoint(request, request.num_computed_tokens)
        computed = request.num_computed_tokens
        new_blocks = self._find_blocks(request, computed + num_known + num_drafts, plan)
        if new_blocks is None:
            return
        samples = computed + num_known >= len(request.all_token_ids)
        plan.put(request, Entry(num_known + num_drafts, num_drafts, samples, new_blocks))

    def _missing(self, request: Request) -> tuple[int, int]:
        """Return (number of known tokens without KV, number of drafts to verify after them). It is
        (0, 0) if the request must wait for its own result, or if the steps in flight are certain to
        end it."""
        computed = request.num_computed_tokens
        num_tokens = len(request.all_token_ids)
        if computed < num_tokens - 1:
            return num_tokens - computed, 0
        limits = self._limits
        if computed >= num_tokens:  # outputs are in flight: 1 per sampling step
            num_pending = computed - num_tokens + 1
            return (1, 0) if request.output_room(limits.max_model_len) > num_pending else (0, 0)
        if not request.draft_token_ids:
            return 1, 0
        return 1, max(
            0,
            min(
                len(request.draft_token_ids),
                limits.max_drafts,
                request.output_room(limits.max_model_len) - 1,
            ),
        )

    def _shorten(
        self, request: Request, num_known: int, num_drafts: int, plan: StepPlan
    ) -> tuple[int, int]:
        """Limit both numbers to the rest of the step's budget. The grammar may trim the drafts
        further."""
        if num_known > 1:
            return self._prefill.chunk(request, num_known, plan), num_drafts
        num_drafts = min(num_drafts, plan.tokens_left - 1)
        if num_drafts and request.grammar is not None:
            wanted = request.draft_token_ids[:num_drafts]
            num_drafts = len(self._grammars.trim(request, wanted))
            plan.has_trimmed_drafts |= num_drafts < len(wanted)
        return 1, num_drafts

    def _find_blocks(self, request: Request, num_tokens: int, plan: StepPlan) -> NewBlocks | None:
        """Return new blocks for `num_tokens` tokens, taken from victims if there is no other way.
        Return None if the request must wait."""
        queues = self._queues
        while (new_blocks := self._kv.allocate(request, num_tokens)) is None:
            if request.num_waiting_children and self._kv.stop_keeping(request):
                continue
            if queues.draining:
                # draining requests will release blocks soon, so no more victims are needed
                return None
            victim = expect(
                queues.policy.victim(tuple(queues.running), request),
                Request | None,
                queues.policy,
                "victim",
            )
            if (victim is None or victim is request) and queues.reclaim(request):
                continue
            if victim is None:
                return None
            plan.withdraw(victim)
            plan.has_preempted = True
            queues.preempt(victim)
            if victim is request:
                return None
        return new_blocks

    # --- update -----------------------------------------------------------------------------------

    def update(self, batch: Batch, output: StepOutput) -> None:
        """Apply the results to the requests of the step. Results for rows that their request has
        left meanwhile are dropped."""
        self._close(batch, output)
        if output.transfers:
            self._take_reports(output.transfers)
        places = {row: place for place, row in enumerate(output.rows.tolist())}
        token_ids = output.token_ids.lists()
        drafts = output.draft_token_ids.lists() if output.draft_token_ids is not None else None
        flat = output.token_ids.flat
        vocab_size = self._limits.vocab_size
        is_sound = not len(flat) or (flat.min() >= 0 and flat.max() < vocab_size)
        now_s = self._queues.clock()
        columns = (batch.rows, batch.num_scheduled_tokens, batch.num_draft_tokens)
        for row, num_tokens, num_drafts in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            request = self._queues.by_row[row]
            assert request is not None, f"row {row} was freed while step {batch.step} held it"
            request.num_in_flight_steps -= 1
            request.num_in_flight_tokens -= num_tokens + request.num_loading_tokens
            request.num_loading_tokens = 0
            if request.status is not RequestStatus.RUNNING:
                if not request.num_in_flight_steps:
                    self._queues.vacate(request)
                continue
            place = places.get(row)
            if place is None:  # part of a prompt
                self._commit(request)
                continue
            if output.embeddings is not None:
                self._commit(request)
                self._queues.totals["external_prefix_cache_hits_total"] += (
                    request.num_external_tokens
                )
                self._metrics.tokens(request, 0, now_s)
                self._queues.finish(request, *request.embedded(output.embeddings[place]))
                continue
            if not is_sound and not all(0 <= token < vocab_size for token in token_ids[place]):
                self._queues.fail(request, "error", BAD_TOKENS.format(token_ids[place]))
                continue
            request.num_computed_tokens -= num_drafts + 1 - len(token_ids[place])
            self._take_tokens(request, token_ids[place], output, place, now_s)
            request.draft_token_ids = drafts[place] if drafts is not None else []
            if num_drafts:
                self._metrics.drafts(num_drafts, len(token_ids[place]) - 1)

    def _close(self, batch: Batch, output: StepOutput) -> None:
        """End a step: release its copies, and report its times to the policy, the pacing and the
        metrics."""
        step = self._steps.pop(batch.step)
        self._kv.copies_done(step.copies)
        self._queues.policy.observe(step.load, output.times)
        if self._pacing is not None:
            self._pacing.observe(step.num_prefill_tokens, output.times.total_s)
        self._metrics.step(batch, output.times, self._queues.by_row)

    def _take_tokens(
        self, request: Request, token_ids: list[int], output: StepOutput, place: int, now_s: float
    ) -> None:
        is_first = not request.output_token_ids
        kept, reason = request.append_until_stop(token_ids, self._limits.max_model_len)
        self._commit(request)
        delta = RequestDelta(request_id=request.request_id, index=request.index, token_ids=kept)
        if is_first:
            delta.num_cached_tokens = request.num_cached_tokens
            self._queues.totals["external_prefix_cache_hits_total"] += request.num_external_tokens
            if output.prompt_logprobs and request.row in output.prompt_logprobs:
                positions = _positions(output.prompt_logprobs[request.row])
                delta.prompt_logprobs = msgspec.Raw(msgspec.msgpack.encode(positions))
        if output.logprobs is not None and (logprobs := output.logprobs[place]) is not None:
            delta.logprobs = _positions(logprobs)[: len(kept)]
        self._metrics.tokens(request, len(kept), now_s)
        if request.grammar is not None:
            reason = self._advance_grammar(request, kept, delta, reason)
        if reason is None:
            self._queues.deltas.append(delta)
        else:
            self._queues.finish(request, delta, reason)

    def _advance_grammar(
        self, request: Request, token_ids: list[int], delta: RequestDelta, reason: str | None
    ) -> str | None:
        """Advance the grammar and return the finish reason. The completion also ends if the grammar
        allows only a stop token but no stop token can be sampled, because of min_tokens or because
        the model has none."""
        params = request.params
        assert params.structured_outputs, "it has a grammar"
        if request.grammar.accept(token_ids) != len(token_ids):
            failure = request.grammar.error
            delta.error = str(
                failure
                or f"token ids {token_ids} do not fit the request's grammar; {NO_TOKEN_LEFT}"
            )
            if not isinstance(failure, PluginFailure):
                delta.error_parameter = params.structured_outputs.parameter
            return "error"
        if reason is not None:
            return reason
        may_stop = params.eos_token_ids and (
            params.ignore_eos or len(request.output_token_ids) >= params.min_tokens
        )
        if may_stop or not request.grammar.has_ended():
            return None
        delta.ends_whole = True
        return "stop"

    def _commit(self, request: Request) -> None:
        """Commit the tokens that no step in flight can still change."""
        self._kv.commit(request, min(request.num_confirmed_tokens, len(request.all_token_ids)))

    # --- update: KV transfers ---------------------------------------------------------------------

    def _take_reports(self, reports: Mapping[str, TransferReport]) -> None:
        """Apply the connectors' reports. A request whose load failed computes the rest itself, or
        ends with an error."""
        queues = self._queues
        loaded, failed = queues.connectors.update(reports)
        for key in loaded:
            if (request := queues.loading.pop(key, None)) is not None:
                request.status = RequestStatus.WAITING
                self._kv.commit(request, request.num_computed_tokens)
        for key, first_bad_token in failed.items():
            request = queues.requests.get(key)
            if request is None or request.status not in (
                RequestStatus.LOADING,
                RequestStatus.RUNNING,
            ):
                continue
            if self._limits.kv_load_failure_policy == "fail":
                queues.fail(request, "error", LOAD_FAILED)
            elif request.status is RequestStatus.RUNNING:
                # what it computed after the load is invalid and was not committed
                request.not_loaded()
                queues.preempt(request)
            else:
                self._continue_without(queues.loading.pop(key), first_bad_token)

    def _continue_without(self, request: Request, first_bad_token: int) -> None:
        """Handle a failed load between steps: keep the blocks if possible, and compute from the
        first bad token on."""
        request.status = RequestStatus.WAITING
        request.not_loaded(first_bad_token)
        if not self._kv.can_resume(request, first_bad_token):
            self._queues.drop_blocks(request)
        else:
            request.num_computed_tokens = min(request.num_computed_tokens, first_bad_token)
            self._kv.commit(request, request.num_computed_tokens)


def _positions(logprobs: Logprobs) -> list[PositionLogprobs]:
    """Convert arrays to one object per position."""
    columns = zip(
        logprobs.token_ids.tolist(), logprobs.values.tolist(), logprobs.ranks.tolist(), strict=True
    )
    return [PositionLogprobs(token_ids, values, rank) for token_ids, values, rank in columns]
