"""Admits waiting requests: checks what they wait for, finds their cached prefixes, reserves blocks,
and gives them rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import cast

from pegboard.config.limits import Limits
from pegboard.engine.batch_builder import Entry, StepPlan
from pegboard.engine.grammar.grammars import Grammars
from pegboard.engine.kv.cache import PrefixHit
from pegboard.engine.queues import External, Queues
from pegboard.engine.requests import Request
from pegboard.errors import EngineDeadError, PegboardError, expect
from pegboard.interfaces.scheduling_policy import RequestStatus


class Verdict(Enum):
    """What happened to a waiting request. SKIPPED: it still waits, and the next one is tried.
    BLOCKED: it still waits, and no request after it may be admitted."""

    ADMITTED = "admitted"
    SKIPPED = "skipped"
    BLOCKED = "blocked"


@dataclass(slots=True)
class _Start:
    """Where the computation of a request starts. hit: its cached prefix; None = not looked up.
    external: the prefix that a connector adds. is_loaded: a connector has loaded its blocks between
    steps; num_computed_tokens says how many tokens."""

    hit: PrefixHit | None = None
    external: External = External()
    is_loaded: bool = False

    @property
    def num_cached(self) -> int:
        return (self.hit.num_tokens if self.hit else 0) + self.external.match.num_tokens


class Prefill:
    """The second half of scheduling. It keeps no state between steps."""

    def __init__(self, limits: Limits, queues: Queues, grammars: Grammars) -> None:
        self._limits = limits
        self._queues = queues
        self._kv = queues.kv
        self._grammars = grammars

    def admit(self, plan: StepPlan) -> None:
        """Admit requests in the policy's order until rows, tokens or blocks run out. A request
        whose grammar cannot be compiled, or whose adapter cannot be loaded, fails."""
        queues = self._queues
        admitted: list[Request] = []
        # not the error: it would make a cycle with this frame
        failed: list[tuple[Request, str, str | None]] = []
        # The policy returns the objects that it was given.
        for request in cast(
            "Iterator[Request]", expect(queues.policy.waiting(), Iterable, queues.policy, "waiting")
        ):
            if plan.tokens_left <= 0 or not queues.free_rows:
                break
            verdict = self._try(request, plan, failed)
            if verdict is Verdict.ADMITTED:
                admitted.append(request)
            elif verdict is Verdict.BLOCKED:
                break
        for request in admitted:
            queues.stop_waiting(request)
        for request, reason, parameter in failed:
            queues.fail(request, "error", reason, parameter)

    def _try(
        self, request: Request, plan: StepPlan, failed: list[tuple[Request, str, str | None]]
    ) -> Verdict:
        loras = self._queues.loras
        try:
            if not self._is_ready(request) or not (request.lora is None or loras.assign(request)):
                return Verdict.SKIPPED
        except EngineDeadError:
            raise
        except PegboardError as error:
            failed.append((request, str(error), getattr(error, "parameter", None)))
            return Verdict.SKIPPED
        verdict = self._try_with_adapter(request, plan)
        if request.adapter is not None and verdict is not Verdict.ADMITTED:
            loras.release(request)
        return verdict

    def _try_with_adapter(self, request: Request, plan: StepPlan) -> Verdict:
        if self._fork(request, plan):
            return Verdict.ADMITTED
        start = self._find_start(request)
        if start is None:
            return Verdict.SKIPPED
        if start.external.match.load == "between_steps":
            return self._begin_loading(request, start)
        before = request.num_computed_tokens
        request.num_computed_tokens += start.num_cached
        verdict = self._schedule(request, start, plan)
        if verdict is not Verdict.ADMITTED:
            request.num_computed_tokens = before
        return verdict

    # --- what a request may wait for --------------------------------------------------------------

    def _is_ready(self, request: Request) -> bool:
        """Return whether the request waits only for a row. Raises PegboardError if its grammar
        cannot be compiled."""
        if request.status is RequestStatus.LOADING or self._parent_is_busy(request):
            return False
        return request.compilation is None or self._grammars.take(request)

    def _parent_is_busy(self, request: Request) -> bool:
        """Return whether the parent has yet to finish computing the prompt. The child waits for
        that, because it can then share the blocks."""
        parent = request.parent
        if parent is None or parent.is_finished or parent.num_output_tokens:
            return False
        return parent.num_confirmed_tokens < parent.num_prompt_tokens

    # --- where its computation starts -------------------------------------------------------------

    def _fork(self, request: Request, plan: StepPlan) -> bool:
        """Start a completion of n > 1 from its parent's blocks, so that only the last prompt token
        must be computed. Return False if that is not possible; the request is then admitted
        normally."""
        parent = request.parent
        if (
            parent is None
            or parent.status is not RequestStatus.RUNNING
            or parent.lora != request.lora
        ):
            return False
        num_prompt = request.num_prompt_tokens
        if (
            self._kv.holds(request)
            or request.num_output_tokens
            or parent.num_confirmed_tokens < num_prompt
        ):
            return False  # steps in flight may turn out to be invalid (a failed KV load)
        if not self._kv.fork(parent, request):
            return False
        request.num_computed_tokens = num_prompt - 1
        request.num_cached_tokens = parent.num_cached_tokens
        self._queues.connectors.allocated(request, External())
        self._run(request, 1, True, plan)
        return True

    def _find_start(self, request: Request) -> _Start | None:
        """Return the longest prefix that need not be computed: already loaded, cached here, or at a
        connector. Return None if a connector must be asked again in a later step."""
        if self._kv.holds(request):  # a connector has loaded its blocks
            return _Start(is_loaded=True)
        if getattr(request.params, "skip_reading_prefix_cache", False):
            return _Start()
        hit = self._kv.lookup(request)
        external = self._queues.connectors.find(request, hit.num_tokens)
        return None if external is None else _Start(hit, external)

    def _begin_loading(self, request: Request, start: _Start) -> Verdict:
        """Reserve blocks for the prefix. The request waits without a row until the connector has
        loaded them."""
        blocks = self._kv.allocate(
            request, start.num_cached, hit=start.hit, num_computed_tokens=start.num_cached
        )
        if blocks is None:
            if not self._is_alone() or self._queues.reclaim(request):
                return Verdict.BLOCKED
            # there will never be more free blocks than now, so compute it chunk by chunk
            request.uses_connectors = False
            return Verdict.SKIPPED
        self._count_query(request, start)
        request.num_computed_tokens = start.num_cached
        request.status = RequestStatus.LOADING
        self._queues.loading[request.key] = request
        self._queues.connectors.allocated(request, start.external)
        return Verdict.SKIPPED

    # --- its first tokens -------------------------------------------------------------------------

    def _schedule(self, request: Request, start: _Start, plan: StepPlan) -> Verdict:
        computed = request.num_computed_tokens
        num_missing = request.num_tokens - computed
        if (
            not self._limits.enable_chunked_prefill
            and num_missing > plan.tokens_left < plan.budget.max_tokens
        ):
            return Verdict.BLOCKED  # it waits for a step that can compute the whole prompt
        num_tokens = self.chunk(request, num_missing, plan)
        samples = num_tokens == num_missing
        if num_tokens == 0 or (not samples and not plan.allows_partial(request)):
            return Verdict.SKIPPED
        while (
            self._kv.allocate(
                request, computed + num_tokens, hit=start.hit, num_computed_tokens=computed
            )
            is None
        ):
            if not self._is_alone() or not self._queues.reclaim(request):
                return Verdict.BLOCKED
        self._count_query(request, start)
        if not start.is_loaded:
            self._queues.connectors.allocated(request, start.external)
            request.num_loading_tokens = start.external.match.num_tokens
            request.num_in_flight_tokens += request.num_loading_tokens
        self._run(request, num_tokens, samples, plan)
        return Verdict.ADMITTED

    def chunk(self, request: Request, num_missing: int, plan: StepPlan) -> int:
        """Return how many of the missing tokens this step computes, within the budget and the chunk
        limit. A chunk ends where a state can be cached, if there is such a place in it."""
        num_tokens = min(num_missing, plan.tokens_left)
        if self._limits.enable_chunked_prefill:
            num_tokens = min(
                num_tokens, max(1, plan.budget.max_chunk), self._limits.long_prefill_token_threshold
            )
        every = self._kv.checkpoint_every
        computed = request.num_computed_tokens
        if every and num_tokens > 1:
            border = (computed + num_tokens) // every * every
            if border > computed:
                num_tokens = border - computed
        return num_tokens

    def _run(self, request: Request, num_tokens: int, samples: bool, plan: StepPlan) -> None:
        self._queues.run(request)
        plan.put(request, Entry(num_tokens, 0, samples, self._kv.tables(request), is_new=True))

    def _is_alone(self) -> bool:
        """Return whether no other request runs, loads or drains, so that no blocks will be
        freed."""
        queues = self._queues
        return not (queues.running or queues.draining or queues.is_transferring)

    def _count_query(self, request: Request, start: _Start) -> None:
        """Count queries and local hits, at the first admission only. External hits count with the
        first token: loads can fail."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = start.num_cached
            if start.hit is not None:
                totals = self._queues.totals
                hit = start.hit.num_tokens
                totals["prefix_cache_queries_total"] += request.num_tokens
                totals["prefix_cache_hits_total"] += hit
                request.num_external_tokens = start.num_cached - hit
                totals["external_prefix_cache_queries_total"] += (
                    request.num_tokens - hit if self._queues.connectors else 0
                )
