"""What a finished step means for its requests: tokens appended, ends found, blocks committed, deltas made."""

from __future__ import annotations

from typing import Literal

from pegboard.config.limits import Limits
from pegboard.data.batch import Batch, Logprobs, StepOutput
from pegboard.data.request import PositionLogprobs, Request, RequestDelta, RequestStatus
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.kv.cache import KVCache
from pegboard.engine.kv.connectors import Transfers
from pegboard.engine.media_plan import MediaPlanner
from pegboard.engine.metrics.step import StepMetrics
from pegboard.engine.roster import Roster
from pegboard.engine.stop_check import append_until_stop
from pegboard.log import get_logger

log = get_logger(__name__)


class Outcome:
    """Applies results in the order of the steps. Results for rows whose request has left meanwhile are dropped."""

    def __init__(
        self,
        limits: Limits,
        roster: Roster,
        kv: KVCache,
        transfers: Transfers,
        media: MediaPlanner,
        metrics: StepMetrics,
    ) -> None:
        self._limits = limits
        self._roster = roster
        self._kv = kv
        self._transfers = transfers
        self._media = media
        self._metrics = metrics

    def apply(self, batch: Batch, output: StepOutput) -> None:
        """Bring all requests of the step up to date; deltas are left in the roster."""
        failed_loads = self._arrivals(output)
        places = {row: place for place, row in enumerate(output.rows.tolist())}
        token_ids = output.token_ids.lists()
        drafts = output.draft_token_ids.lists() if output.draft_token_ids is not None else None
        now_s = self._roster.clock()
        if output.nan_rows is not None:
            self._metrics.corrupted(self._roster.by_row[row] for row in output.nan_rows.tolist())
        columns = (batch.rows, batch.num_scheduled_tokens, batch.num_draft_tokens)
        for row, num_tokens, num_drafts in zip(*(column.tolist() for column in columns), strict=True):
            request = self._roster.by_row[row]
            assert request is not None, f"row {row} was freed while step {batch.step} held it"
            request.num_in_flight_steps -= 1
            request.num_in_flight_tokens -= num_tokens + request.num_loading_tokens
            request.num_loading_tokens = 0
            if request.status is not RequestStatus.RUNNING:
                if not request.num_in_flight_steps:
                    self._roster.settle(request)
                continue
            if request.key in failed_loads:
                self._redo(request)
                continue
            place = places.get(row)
            if place is None:
                self._advance(request, output, row)
                continue
            request.num_computed_tokens -= num_drafts + 1 - len(token_ids[place])
            self._take_tokens(request, token_ids[place], output, place, now_s)
            request.draft_token_ids = drafts[place] if drafts is not None else []
            if num_drafts:
                self._metrics.drafts(num_drafts, len(token_ids[place]) - 1)
        if output.nan_rows is not None and len(output.nan_rows):
            log.warning(
                "step %d: the logits of %d rows held NaN; the weights or the kernels are wrong", batch.step, len(output.nan_rows)
            )

    # --- tokens -------------------------------------------------------------------------------------------------------------

    def _advance(self, request: Request, output: StepOutput, row: int) -> None:
        """A row without tokens: part of a prompt, or a pooled prompt."""
        self._commit(request)
        if row in output.pooled:
            self._end(
                request, RequestDelta(request_id=request.request_id, index=request.index, pooled=output.pooled[row]), "stop"
            )

    def _take_tokens(self, request: Request, token_ids: list[int], output: StepOutput, place: int, now_s: float) -> None:
        is_first = not request.output_token_ids
        kept, reason = append_until_stop(request, token_ids, self._limits.max_model_len)
        self._commit(request)
        delta = RequestDelta(request_id=request.request_id, index=request.index, token_ids=kept)
        if is_first:
            delta.num_cached_tokens = request.num_cached_tokens
            if output.prompt_logprobs and request.row in output.prompt_logprobs:
                delta.prompt_logprobs = _positions(output.prompt_logprobs[request.row])
        if output.logprobs is not None and (logprobs := output.logprobs[place]) is not None:
            delta.logprobs = _positions(logprobs)[: len(kept)]
        self._metrics.tokens(request, len(kept), now_s)
        if request.grammar is not None:
            reason = self._advance_grammar(request, kept, delta, reason)
        if reason is None:
            self._roster.deltas.append(delta)
        else:
            self._end(request, delta, reason)

    def _advance_grammar(self, request: Request, token_ids: list[int], delta: RequestDelta, reason: str | None) -> str | None:
        """The finish reason, the grammar's if it has one: where it wants a stop token and min_tokens (or a model without any)
        allows none, the text is whole and the completion ends."""
        params = request.params
        assert isinstance(params, SamplingParams) and params.structured_outputs, "it has a grammar"
        if request.grammar.accept(token_ids) != len(token_ids):
            delta.error = (
                f"token ids {token_ids} do not fit the request's grammar; logit_bias, allowed_token_ids or bad_words leave none "
                "of the tokens that it allows"
            )
            delta.error_parameter = params.structured_outputs.parameter
            return "error"
        if reason is not None:
            return reason
        may_stop = params.eos_token_ids and (params.ignore_eos or len(request.output_token_ids) >= params.min_tokens)
        if may_stop or not request.grammar.has_ended():
            return None
        delta.ends_whole = True
        return "stop"

    def _commit(self, request: Request) -> None:
        """What no step in flight can change any more is valid."""
        confirmed = request.num_confirmed_tokens
        self._kv.commit(request, min(confirmed, len(request.all_token_ids)))
        if request.media:
            self._media.passed(request, confirmed)

    def _end(self, request: Request, delta: RequestDelta, reason: str) -> None:
        delta.kv_transfer_params = self._roster.finish(request, reason)
        delta.finish_reason = reason
        delta.stop_reason = request.stop_reason
        self._roster.deltas.append(delta)

    def fail(self, request: Request, reason: Literal["abort", "error", "stop"], error: str | None = None) -> None:
        """End a request, in whatever status, without a result. "stop": whoever reads its text has found a stop string."""
        delta = RequestDelta(request_id=request.request_id, index=request.index, error=error, finish_reason=reason)
        delta.kv_transfer_params = self._roster.finish(request, reason, why="aborted")
        self._roster.deltas.append(delta)

    # --- KV transfers -------------------------------------------------------------------------------------------------------

    def _arrivals(self, output: StepOutput) -> set[str]:
        """Take the connectors' reports. Returns the keys of requests whose load inside this step failed."""
        if not output.transfers:
            return set()
        arrivals = self._transfers.update(output.transfers)
        for key in arrivals.loaded:
            if (request := self._roster.loading.pop(key, None)) is not None:
                request.status = RequestStatus.WAITING
                self._kv.commit(request, request.num_computed_tokens)
        in_step = set()
        for key, first_bad_token in arrivals.failed.items():
            if (request := self._roster.loading.pop(key, None)) is not None:
                request.status = RequestStatus.WAITING
                self._continue_without(request, first_bad_token)
            else:
                in_step.add(key)
        return in_step

    def _continue_without(self, request: Request, first_bad_token: int) -> None:
        """A load between steps failed: keep the blocks if they allow it, and compute from the first bad token on."""
        if self._limits.kv_load_failure_policy == "fail":
            self.fail(request, "error", _load_failed(first_bad_token))
            return
        if not self._kv.can_resume(request, first_bad_token):
            self._roster.drop_blocks(request)
            return
        request.num_computed_tokens = min(request.num_computed_tokens, first_bad_token)
        request.uses_connectors = False
        self._kv.commit(request, request.num_computed_tokens)

    def _redo(self, request: Request) -> None:
        """A load inside the step failed, so everything computed on top of it is void. Nothing of it was committed: the request
        starts over from what is cached here."""
        request.uses_connectors = False
        if self._limits.kv_load_failure_policy == "fail":
            self.fail(request, "error", _load_failed(None))
        else:
            self._roster.preempt(request)


def _load_failed(first_bad_token: int | None) -> str:
    where = "" if first_bad_token is None else f" from token {first_bad_token} on"
    return f"a KV connector could not load the request's prefix{where}, and kv_load_failure_policy is 'fail'"


def _positions(logprobs: Logprobs) -> list[PositionLogprobs]:
    """Arrays to one object per position."""
    columns = zip(logprobs.token_ids.tolist(), logprobs.values.tolist(), logprobs.ranks.tolist(), strict=True)
    return [PositionLogprobs(token_ids, values, rank) for token_ids, values, rank in columns]
