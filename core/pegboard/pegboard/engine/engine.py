"""The engine takes requests, runs one step at a time and returns deltas. It owns all mutable state.

    step():  submit steps → apply the result of the oldest one → return the deltas

Only one thread may call it. It knows nothing about text, HTTP or torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import msgspec

from pegboard.config.limits import Limits
from pegboard.data.request import EngineRequest, RequestDelta
from pegboard.engine.actions import Action, Decisions, R, Stats
from pegboard.engine.controls import Controls, no_checkpoint
from pegboard.engine.grammar.compiler import GrammarCompiler
from pegboard.engine.grammar.grammars import Grammars
from pegboard.engine.kv.cache import KVCache
from pegboard.engine.life import Life
from pegboard.engine.metrics.step import StepMetrics
from pegboard.engine.queues import KVConnectors, Queues
from pegboard.engine.requests import check_request, completions_of
from pegboard.engine.scheduler import Scheduler
from pegboard.engine.steps import Steps
from pegboard.errors import Overloaded, RequestError
from pegboard.interfaces.attention import KVPlan
from pegboard.interfaces.executor import Executor
from pegboard.interfaces.kv_connector import KVConnectorScheduler
from pegboard.interfaces.metrics import MetricsSink
from pegboard.interfaces.scheduling_policy import SchedulingPolicy

GRAMMAR_NAP_S = 0.01
"""The longest time, in seconds, that a step sleeps while every request waits for its grammar to be
compiled."""

CONNECTOR_NAP_S = 0.002
"""How long a step sleeps, in seconds, while every request waits for a KV connector that wants to be
asked again."""


class Engine:
    """Serves requests on an executor whose model is loaded and whose KV cache is allocated.

    connectors: implementations by plugin name, in chain order. grammars: this engine owns them and
    stops them. has_priority: the policy honours `EngineRequest.priority`. kv_plan: has room for one
    request of `limits.max_model_len` tokens, as `plan_kv` checks. plugin_modules: module → id of
    the plugin that it belongs to; a failure in the module is reported with that id. decisions:
    returns the plugins that were chosen for this engine, and why. can_sleep: `enable_sleep_mode` is
    set. describe_update: returns the checkpoint at a path. embedding_size: the width of prompts
    that are embeddings; 0 = they are refused. clock: returns seconds on the same clock as
    `EngineRequest.arrival_s`.

    After a plugin or the executor has failed in a step, the engine is dead: every call raises
    EngineDeadError.
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
        metrics: StepMetrics | None = None,
        has_priority: bool = False,
        kv_events: bool = False,
        plugin_modules: Mapping[str, str] | None = None,
        decisions: Callable[[], list[dict[str, Any]]] = list,
        can_sleep: bool = False,
        describe_update: Callable[[str], Any] = no_checkpoint,
        embedding_size: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self._executor = executor
        self._grammars = grammars or Grammars(GrammarCompiler({}), vocab_size=limits.vocab_size)
        metrics = metrics or StepMetrics(limits)
        kv = KVCache(kv_plan, limits)
        if kv_events:
            kv.pool.events = []
        self._has_priority = has_priority
        self._embedding_size = embedding_size
        self._clock = clock
        self._metrics = metrics
        self._queues = Queues(
            limits, kv, policy, KVConnectors(connectors or {}, kv), clock, executor.call
        )
        self._scheduler = Scheduler(limits, self._queues, self._grammars, metrics)
        self._life = Life(plugin_modules or {}, executor)
        self._steps = Steps(
            limits, executor, self._scheduler, self._queues, self._grammars, metrics, self._life
        )
        self._controls = Controls(
            limits,
            executor,
            self._life,
            self._queues,
            self._scheduler,
            self._steps,
            metrics,
            answers={Stats: self.stats, Decisions: decisions},
            describe=describe_update,
            can_sleep=can_sleep,
        )

    # --- requests ---------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Add a request. `params.n` > 1 becomes n completions. Raises RequestError if the request
        cannot be served (the prompt is empty or too long, a token id is outside the vocabulary, the
        request id is in use, …), and Overloaded if the queue is full."""
        self._life.check()
        queues = self._queues
        if request.request_id in queues.completions:
            raise RequestError(
                f"request id {request.request_id!r} is in use; choose another",
                parameter="request_id",
            )
        check_request(
            request,
            self.limits,
            has_priority=self._has_priority,
            embedding_size=self._embedding_size,
        )
        constraint = request.params.structured_outputs
        if constraint is not None:
            self._grammars.check(constraint)
        most = self.limits.max_num_queued_reqs
        if queues.num_waiting + request.params.n > most:
            raise Overloaded(
                f"{queues.num_waiting} completions are waiting, the limit is {most}; "
                "try again later"
            )
        if not request.arrival_s:
            request = msgspec.structs.replace(request, arrival_s=self._clock())
        if request.lora is not None:
            request = msgspec.structs.replace(request, lora=queues.loras.arrive(request.lora))
        with self._life.changing():
            for completion in completions_of(request):
                if constraint is not None:
                    self._grammars.start(completion)
                queues.add(completion)

    def abort(self, request_ids: Sequence[str], reason: Literal["abort", "stop"] = "abort") -> None:
        """End requests with all their completions, or single completions by key. The next step
        returns their last delta. Unknown ids are ignored, because the request may just have
        finished. reason: the finish reason."""
        queues = self._queues
        with self._life.changing():
            for name in request_ids:
                one = queues.requests.get(name)
                completions = queues.completions.get(name) or ([] if one is None else [one])
                for request in list(completions):
                    queues.fail(request, reason)

    # --- the loop ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: requests, steps in flight, open KV transfers, deltas
        to return, an action that is not done, or a death."""
        queues = self._queues
        can_run = bool(queues.requests) and not self._scheduler.is_paused
        is_open = self._steps or queues.deltas or queues.is_transferring or self._controls.is_busy
        return bool(can_run or is_open or self._life.end)

    def step(self) -> list[RequestDelta]:
        """Submit steps while possible, apply the oldest result, and return the deltas of the
        requests."""
        with self._life.changing():
            self._steps.submit_all()
            if self._steps:
                self._steps.finish_oldest()
            elif not self._queues.deltas:
                self._nap()
            self._controls.advance()
            self._publish()
            self._steps.drop_adapters()
            return self._queues.take_deltas()

    def _nap(self) -> None:
        """Every request waits for something else. Let it have the processor."""
        self._grammars.compiler.wait(GRAMMAR_NAP_S)
        if self.limits.max_loras:
            self._queues.loras.wait()
        if self._queues.connectors:
            time.sleep(CONNECTOR_NAP_S)

    # --- control ----------------------------------------------------------------------------------

    def control(self, action: Action[R]) -> "Future[R]":
        """Carry out an action between two steps (see `engine/actions.py`). The future has its
        answer as soon as it is done, which may be after some calls of `step`."""
        self._life.check()
        future = self._controls.start(action)
        self._steps.drop_adapters()
        self._publish()
        return future

    # --- metrics ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return current numbers, totals since the start, and how many blocks each running request
        holds in each KV group."""
        kv = self._queues.kv
        return {
            **self._gauges(),
            **self._queues.totals,
            "num_steps_in_flight": len(self._steps),
            "num_blocks": kv.pool.num_blocks,
            "num_free_blocks": kv.pool.num_free,
            "num_cached_blocks": kv.pool.num_cached,
            "blocks_of": {
                request.key: [len(table) - table.count(0) for table in kv.tables(request)]
                for request in self._queues.running
            },
        }

    def attach(self, sink: MetricsSink) -> None:
        """Add a sink. It receives the declared metrics and the current state at once."""
        self._metrics.attach(sink, self._gauges())

    def _publish(self) -> None:
        metrics = self._metrics
        queues = self._queues
        pool = queues.kv.pool
        for name, total in queues.totals.items():
            metrics.count_up_to(name, total)
        if pool.residency is not None:
            metrics.block_stays(pool.residency)
        for request in queues.take_ended():
            metrics.finished(request, self._clock())
        if self.limits.max_loras:
            metrics.loras(queues.running, queues.requests)
        metrics.publish(self._gauges(), queues.kv.take_events())

    def _gauges(self) -> dict[str, float]:
        return {
            "num_requests_running": len(self._queues.running),
            "num_requests_waiting": self._queues.num_waiting,
            "kv_cache_usage_perc": self._queues.kv.pool.usage,
        }

    def stop(self) -> None:
        """Drop all requests and stop the executor. A second call does nothing. The engine accepts
        no requests afterwards."""
        self._grammars.compiler.stop()
        self._metrics.close()
        self._executor.stop()
        self._life.stop("it was stopped")
