"""The engine: requests in, one step at a time, deltas out. The only owner of everything that changes.

    step():  fill the in-flight queue → take the oldest step → give it its token masks → apply its result

One thread calls it. Nothing here knows text, HTTP or torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from pegboard.config.limits import Limits
from pegboard.data.batch import Batch, StepOutput
from pegboard.data.request import EngineRequest, Request, RequestDelta
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.blamed import BlamedPolicy
from pegboard.engine.controls import Controls
from pegboard.engine.encoder_cache import EncoderCache
from pegboard.engine.grammar.grammars import Grammars
from pegboard.engine.kv.cache import KVCache
from pegboard.engine.kv.connectors import Transfers
from pegboard.engine.kv.residency import BlockResidency
from pegboard.engine.lora_slots import LoRASlots
from pegboard.engine.media_plan import MediaPlanner
from pegboard.engine.metrics.catalogue import MeasuredEngine
from pegboard.engine.metrics.step import StepMetrics
from pegboard.engine.outcome import Outcome
from pegboard.engine.request_check import RequestCheck, check_limits
from pegboard.engine.roster import Roster
from pegboard.engine.scheduler import Scheduler
from pegboard.errors import EngineDeadError, Overloaded, PegboardError, RequestError
from pegboard.interfaces.attention import KVPlan
from pegboard.interfaces.encoder_connector import EncoderConnectorScheduler
from pegboard.interfaces.executor import Executor, StepFuture, WorkerDeath
from pegboard.interfaces.kv_connector import KVConnectorScheduler
from pegboard.interfaces.metrics import MetricsSink
from pegboard.interfaces.scheduling_policy import SchedulingPolicy

GRAMMAR_NAP_S = 0.01
"""How long a step sleeps when nothing but a compiling grammar can bring work."""


class Engine:
    """Serves requests on an executor whose model is loaded and whose KV cache is allocated.

    connectors: implementations by plugin name, in chain order. grammars: this engine's own, stopped with it. has_priority: the
    policy honours `EngineRequest.priority`. measured: what the metrics say about this engine. wants_records: some sink wants a
    record of every request that ended. clock: seconds, the same clock as `EngineRequest.arrival_s`.
    Raises KVCacheTooSmall when the plan cannot hold one request of `limits.max_model_len` tokens.

    After a plugin or the executor has failed in a step, the engine is dead: every call raises EngineDeadError.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        policy: SchedulingPolicy,
        kv_plan: KVPlan,
        limits: Limits,
        connectors: Mapping[str, KVConnectorScheduler] | None = None,
        grammars: Grammars | None = None,
        encoder_connector: EncoderConnectorScheduler | None = None,
        metrics: Sequence[MetricsSink] = (),
        measured: MeasuredEngine | None = None,
        wants_records: bool = False,
        has_priority: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self._executor = executor
        self._clock = clock
        kv = self._kv = KVCache(
            kv_plan,
            enable_prefix_caching=limits.enable_prefix_caching,
            hash_algo=limits.hash_algo,
            record_events=limits.record_kv_events,
            residency=BlockResidency(limits.kv_metrics_share) if limits.kv_metrics_share else None,
        )
        kv.check_fits(limits.max_model_len, limits.chunk_tokens)
        check_limits(limits, media_at_once=kv.has_encoder_groups)
        blamed = BlamedPolicy(policy, f"scheduling_policy {type(policy).__name__}")
        self._transfers = Transfers(connectors or {}, kv)
        encoder_cache = EncoderCache(limits.encoder_cache_tokens)
        self._roster = Roster(limits, kv, blamed, self._transfers, LoRASlots(limits.max_loras), encoder_cache, clock)
        self._grammars = grammars
        media = MediaPlanner(
            encoder_cache, encoder_connector, all_at_once=kv.has_encoder_groups, never_split=limits.never_split_media
        )
        self._scheduler = Scheduler(limits, self._roster, kv, blamed, self._transfers, media, self._grammars)
        measured = measured or MeasuredEngine(
            limits.max_model_len, limits.max_drafts, limits.max_loras, watches_blocks=limits.kv_metrics_share > 0
        )
        self._metrics = StepMetrics(metrics, clock, measured, wants_records=wants_records)
        self._outcome = Outcome(limits, self._roster, kv, self._transfers, media, self._metrics)
        self._check = RequestCheck(limits, self._grammars, has_priority=has_priority)
        self._in_flight: deque[tuple[Batch, StepFuture]] = deque()
        self._dead: str | None = None
        self.decisions: Callable[[], list[dict[str, Any]]] = list
        """Which plugins were chosen for this engine, and why; whoever builds it knows."""
        self._controls = Controls(self, executor, kv, self._roster)
        self._metrics.inform(self._controls.sleep_gauges())
        executor.watch(self._on_death)

    # --- requests -----------------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Take a request in; `params.n` > 1 becomes n completions. Raises RequestError for what cannot be served (empty or too
        long prompt, ids outside the vocabulary, an id in use, …) and Overloaded when the queue is full."""
        self._must_live()
        if request.request_id in self._roster.completions:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another", parameter="request_id")
        self._check(request)
        self._must_have_room(request.params.n if isinstance(request.params, SamplingParams) else 1)
        if not request.arrival_s:
            request = msgspec.structs.replace(request, arrival_s=self._clock())
        with self._dying():
            for completion in _expand(request):
                if self._grammars is not None:
                    self._grammars.start(completion)
                self._roster.add(completion)

    def _must_have_room(self, n: int) -> None:
        most, waiting = self.limits.max_num_queued_reqs, self._roster.num_waiting
        if n > most:
            raise RequestError(f"n must be at most {most}, as many completions may wait here, got {n}", parameter="n")
        if waiting + n > most:
            raise Overloaded(f"{waiting} completions are waiting, the limit is {most}; try again later")

    def abort(self, request_ids: Sequence[str], reason: Literal["abort", "stop"] = "abort") -> None:
        """End requests (all their completions), or single completions by key. Their last delta comes with the next step.
        Unknown ids are ignored: the request may just have finished. reason: their finish reason."""
        self._must_live()
        with self._dying():
            for name in request_ids:
                completions = self._roster.completions.get(name) or filter(None, [self._roster.requests.get(name)])
                for request in list(completions):
                    self._outcome.fail(request, reason)

    # --- the loop -----------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """`step` has something to do: requests, steps in flight, open KV transfers, or deltas to hand out."""
        roster = self._roster
        if self._controls.asleep:
            return bool(roster.deltas)
        return bool(roster.requests or self._in_flight or roster.deltas or self._transfers.has_open)

    def step(self) -> list[RequestDelta]:
        """Submit what can be submitted, apply the oldest result, return what the requests gained."""
        self._must_live()
        if self._controls.asleep:
            return self._take_deltas()
        with self._dying():
            while len(self._in_flight) < self.limits.max_in_flight and (batch := self._schedule()):
                self._in_flight.append((batch, self._submit(batch)))
            if self._in_flight:
                batch, future = self._in_flight.popleft()
                if batch.needs_masks:
                    self._send_masks(batch)
                self._apply(batch, self._result(future))
            elif self._grammars is not None and not self._roster.deltas:
                self._grammars.wait(GRAMMAR_NAP_S)
            self._publish()
            return self._take_deltas()

    def drain(self) -> None:
        """Apply every step in flight without submitting new ones; the deltas come with the next step."""
        self._must_live()
        with self._dying():
            while self._in_flight:
                batch, future = self._in_flight.popleft()
                if batch.needs_masks:
                    self._send_masks(batch)
                self._apply(batch, self._result(future))

    def _schedule(self) -> Batch | None:
        with self._metrics.timed("schedule"):
            return self._scheduler.schedule()

    def _apply(self, batch: Batch, output: StepOutput) -> None:
        with self._metrics.timed("apply"):
            self._scheduler.close(batch.step, output.times)
            self._metrics.step(batch, output.times, self._roster.by_row)
            self._outcome.apply(batch, output)

    def _send_masks(self, batch: Batch) -> None:
        """Older steps are applied, so the grammars are exact; the forward of this step runs meanwhile."""
        assert self._grammars is not None
        by_row = self._roster.by_row
        live = [by_row[row] if by_row[row] not in self._roster.draining else None for row in batch.rows.tolist()]
        started = time.perf_counter()
        masks = self._grammars.masks(batch, live, self._scheduler.drafts(batch.step))
        self._metrics.masks_filled(time.perf_counter() - started)
        with self._executing("take token masks"):
            self._executor.provide_masks(batch.step, masks)

    def _submit(self, batch: Batch) -> StepFuture:
        with self._executing("take a step"):
            return self._executor.submit(batch)

    def _result(self, future: StepFuture) -> StepOutput:
        with self._executing("run a step"), self._metrics.timed("execute"):
            return future.result()

    def _take_deltas(self) -> list[RequestDelta]:
        deltas, self._roster.deltas = self._roster.deltas, []
        return deltas

    def _publish(self) -> None:
        metrics, roster, queries = self._metrics, self._roster, self._scheduler.prefix_queries
        metrics.count_up_to("prefix_cache_queries_total", queries.queries)
        metrics.count_up_to("prefix_cache_hits_total", queries.hits)
        metrics.count_up_to("external_prefix_cache_queries_total", queries.external_queries)
        metrics.count_up_to("external_prefix_cache_hits_total", queries.external_hits)
        metrics.count_up_to("num_preemptions_total", roster.num_preemptions)
        if self._kv.pool.residency is not None:
            metrics.block_stays(self._kv.pool.residency)
        ended, roster.ended = roster.ended, []
        for request in ended:
            metrics.finished(request, self._clock())
        if self.limits.max_loras:
            metrics.loras(roster.running, roster.requests)
        metrics.publish(self._gauges())

    def _gauges(self) -> dict[str, float]:
        return {
            "num_requests_running": len(self._roster.running),
            "num_requests_waiting": self._roster.num_waiting,
            "kv_cache_usage_perc": self._kv.usage,
        }

    def attach(self, sink: MetricsSink) -> None:
        """One more sink. It is told the metrics and the state of this moment at once."""
        self._metrics.attach(sink, self._gauges())

    # --- control ------------------------------------------------------------------------------------------------------------

    def control(self, action: str, **arguments: Any) -> Any:
        """Everything that is not a request: see `pegboard.engine.controls`. RequestError for an unknown action."""
        self._must_live()
        result = self._controls(action, **arguments)
        if action in ("sleep", "wake"):
            self._metrics.inform(self._controls.sleep_gauges())
            self._publish()
        return result

    def stats(self) -> dict[str, Any]:
        """Numbers of this moment and totals since the start."""
        queries = self._scheduler.prefix_queries
        return {
            "num_requests_running": len(self._roster.running),
            "num_requests_waiting": self._roster.num_waiting,
            "num_steps_in_flight": len(self._in_flight),
            "kv_cache_usage_perc": self._kv.usage,
            "num_blocks": self._kv.pool.num_blocks,
            "num_free_blocks": self._kv.pool.num_free,
            "num_cached_blocks": self._kv.pool.num_cached,
            "prefix_cache_queries": queries.queries,
            "prefix_cache_hits": queries.hits,
            "num_preemptions": self._roster.num_preemptions,
        }

    def stop(self) -> None:
        """Drop everything and stop the executor. Idempotent; the engine takes nothing afterwards."""
        if self._grammars is not None:
            self._grammars.stop()
        self._metrics.close()
        self._executor.stop()
        self._dead = self._dead or "it was stopped"

    # --- death --------------------------------------------------------------------------------------------------------------

    def _must_live(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine is dead: {self._dead}")

    def _on_death(self, death: WorkerDeath) -> None:
        self._dead = f"worker {death.rank} died: {death.reason}"

    @contextmanager
    def _dying(self) -> Iterator[None]:
        """Whatever escapes leaves the books in an unknown state: the engine does not go on."""
        try:
            yield
        except BaseException as error:
            self._dead = self._dead or f"{type(error).__name__}: {error}"
            raise

    @contextmanager
    def _executing(self, what: str) -> Iterator[None]:
        """A call into the executor; its failure is the engine's death."""
        try:
            yield
        except EngineDeadError:
            raise
        except Exception as error:  # models, kernels and transports can raise anything
            name = f"{type(error).__name__}: " if not isinstance(error, PegboardError) else ""
            raise EngineDeadError(f"the executor could not {what}: {name}{error}") from error


def _expand(source: EngineRequest) -> Iterator[Request]:
    """The n completions of a request; the first one is the parent whose prompt blocks the others share."""
    parent = Request(source)
    yield parent
    params = source.params
    if not isinstance(params, SamplingParams) or params.n == 1:
        return
    for index in range(1, params.n):
        child = Request(source, index=index, parent=parent)
        if params.prompt_logprobs is not None:  # the parent reports them for all
            child.params = params.clone(prompt_logprobs=None, skip_reading_prefix_cache=None)
        yield child
