"""The engine takes requests, runs one step at a time and returns deltas. It owns all mutable state.

    step():  submit steps → apply the result of the oldest one → return the deltas

Only one thread may call it. It knows nothing about text, HTTP or torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pegboard.config.limits import Limits
from pegboard.data.request import EngineRequest, RequestDelta
from pegboard.engine.actions import Action, R
from pegboard.engine.admission import Admission
from pegboard.engine.checks import check_request
from pegboard.engine.controls import Controls, no_checkpoint
from pegboard.engine.encoder_cache import EncoderCache
from pegboard.engine.forks import Forks
from pegboard.engine.grammar.grammars import Grammars
from pegboard.engine.kv.cache import KVCache
from pegboard.engine.kv.connectors import KVConnectors
from pegboard.engine.kv.events import KVEvents
from pegboard.engine.life import Life
from pegboard.engine.live_requests import LiveRequests
from pegboard.engine.lockstep import Alone, Lockstep
from pegboard.engine.loras import LoRASlots
from pegboard.engine.metrics.step import StepMetrics
from pegboard.engine.requests import completions_of
from pegboard.engine.scheduler import Scheduler
from pegboard.engine.steps import Steps
from pegboard.errors import Overloaded, RequestError
from pegboard.interfaces.attention import KVPlan
from pegboard.interfaces.executor import Executor
from pegboard.interfaces.kv_connector import KVConnectorScheduler
from pegboard.interfaces.metrics import MetricsSink
from pegboard.interfaces.scheduling_policy import SchedulingPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is composed of.

    executor: its model is loaded and its KV cache is allocated. kv_plan: has room for one request
    of `limits.max_model_len` tokens, as `plan_kv` checks. connectors: implementations by plugin
    name, in chain order. grammars: the engine owns them and stops them. has_priority: the policy
    honours `EngineRequest.priority`. embedding_size: the width of prompts that are embeddings; 0 =
    they are refused. kv_events: what memories store and drop, if a sink wants to know. modules:
    module → id of the plugin that it belongs to; a failure in the module is reported with that id.
    decisions: returns the plugins that were chosen for this engine, and why. can_sleep:
    `enable_sleep_mode` is set. describe_update: returns the checkpoint at a path. clock: returns
    seconds on the same clock as `EngineRequest.arrival_s`.
    """

    executor: Executor
    policy: SchedulingPolicy
    kv_plan: KVPlan
    limits: Limits
    grammars: Grammars
    metrics: StepMetrics
    connectors: Mapping[str, KVConnectorScheduler] = field(default_factory=dict)
    has_priority: bool = False
    embedding_size: int = 0
    kv_events: KVEvents | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    decisions: Callable[[], list[dict[str, Any]]] = list
    can_sleep: bool = False
    describe_update: Callable[[str], Any] = no_checkpoint
    clock: Callable[[], float] = time.time


class Engine:
    """Serves requests. After a plugin or the executor has failed in a step, the engine is dead:
    every call raises EngineDeadError."""

    def __init__(self, parts: EngineParts) -> None:
        self.limits = limits = parts.limits
        self._parts = parts
        executor = parts.executor
        self._grammars = grammars = parts.grammars
        kv = KVCache(parts.kv_plan, limits, parts.kv_events)
        connectors = KVConnectors(parts.connectors, kv)
        forks = Forks(kv)
        self._loras = loras = LoRASlots(limits, executor.call) if limits.max_loras else None
        encoder = EncoderCache(limits) if limits.max_num_encoder_input_tokens else None
        optional = (connectors or None, loras, encoder)
        self._gates = gates = (forks, grammars, *(gate for gate in optional if gate is not None))
        self._live = live = LiveRequests(limits, kv, parts.policy, connectors, gates, parts.clock)
        admission = Admission(limits, live, gates, forks)
        metrics = parts.metrics
        self._lockstep = lockstep = Lockstep() if limits.in_lockstep else Alone()
        self._scheduler = Scheduler(
            limits, live, admission, gates, grammars, loras, encoder, metrics
        )
        self._life = Life(parts.modules, executor)
        self._steps = Steps(
            limits, executor, self._scheduler, live, gates, grammars, metrics, self._life, lockstep
        )
        self._controls = Controls(
            executor,
            self._life,
            live,
            self._scheduler,
            self._steps,
            loras,
            metrics,
            lockstep,
            stats=self.stats,
            decisions=parts.decisions,
            describe=parts.describe_update,
            can_sleep=parts.can_sleep,
        )

    # --- requests ---------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Add a request. `params.n` > 1 becomes n completions. Raises RequestError if the request
        cannot be served (the prompt is empty or too long, a token id is outside the vocabulary, the
        request id is in use, …), and Overloaded if the queue is full."""
        self._life.check()
        self._lockstep.wake()
        live = self._live
        if live.named(request.request_id):
            raise RequestError(
                f"request id {request.request_id!r} is in use; choose another",
                parameter="request_id",
            )
        check_request(
            request,
            self.limits,
            has_priority=self._parts.has_priority,
            embedding_size=self._parts.embedding_size,
        )
        constraint = request.params.structured_outputs
        if constraint is not None:
            self._grammars.check(constraint)
        most = self.limits.max_num_queued_reqs
        waiting = len(live.waiting)
        if waiting + request.params.n > most:
            raise Overloaded(
                f"{waiting} completions are waiting, the limit is {most}; try again later"
            )
        if not request.arrival_s:
            request = msgspec.structs.replace(request, arrival_s=self._parts.clock())
        if request.lora is not None and self._loras is not None:
            request = msgspec.structs.replace(request, lora=self._loras.arrive(request.lora))
        for item in request.media:
            live.count("mm_cache_queries_total", 1)
            live.count("mm_cache_hits_total", item.was_kept)
        with self._life.changing():
            for completion in completions_of(request, self.limits.whole):
                if constraint is not None:
                    self._grammars.start(completion)
                live.add(completion)

    def wake(self) -> None:
        """Another engine, with which this one shares out experts, gets a request."""
        self._lockstep.wake()

    def abort(self, request_ids: Sequence[str], reason: Literal["abort", "stop"] = "abort") -> None:
        """End requests with all their completions, or single completions by key. The next step
        returns their last delta. Unknown ids are ignored, because the request may just have
        finished. reason: the finish reason."""
        with self._life.changing():
            for name in request_ids:
                for request in self._live.named(name):
                    self._live.fail(request, reason)

    # --- the loop ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: requests, steps in flight, open KV transfers, deltas
        to return, an action that is not done, other engines that need steps, or a death."""
        live = self._live
        can_run = bool(live) and not self._scheduler.is_paused
        is_open = self._steps or live.has_news or live.is_transferring or self._controls.is_busy
        return bool(can_run or is_open or self._lockstep.is_running or self._life.end)

    def step(self) -> list[RequestDelta]:
        """Submit steps while possible, apply the oldest result, and return the deltas of the
        requests."""
        with self._life.changing():
            self._lockstep.begin_step(has_actions=self._controls.is_busy)
            self._steps.submit_all()
            if self._steps:
                self._steps.finish_oldest()
            elif not self._live.has_news:
                for gate in self._gates:
                    gate.rest()
            self._controls.advance()
            self._end_step()
            return self._live.take_deltas()

    # --- control ----------------------------------------------------------------------------------

    def control(self, action: Action[R]) -> "Future[R]":
        """Carry out an action between two steps (see `engine/actions.py`). The future has its
        answer as soon as it is done, which may be after some calls of `step`."""
        self._life.check()
        self._lockstep.wake()
        future = self._controls.start(action)
        if self._life.end is None:
            self._end_step()
        return future

    # --- metrics ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return current numbers, totals since the start, and how many blocks each running request
        holds in each KV group."""
        kv = self._live.kv
        return {
            **self._gauges(),
            **self._live.totals,
            "num_steps_in_flight": len(self._steps),
            "num_blocks": kv.pool.num_blocks,
            "num_free_blocks": kv.pool.num_free,
            "num_cached_blocks": kv.pool.num_cached,
            "blocks_of": {
                request.key: [len(table) - table.count(0) for table in kv.tables(request)]
                for request in self._live.running
            },
        }

    def attach(self, sink: MetricsSink) -> None:
        """Add a sink. It receives the declared metrics and the current state at once."""
        self._parts.metrics.attach(sink, self._gauges())

    def _end_step(self) -> None:
        """Publish what has happened, and let the gates change the workers if none computes."""
        if not self._steps:
            for gate in self._gates:
                gate.begin(is_idle=True)
        metrics = self._parts.metrics
        live = self._live
        pool = live.kv.pool
        for name, total in live.totals.items():
            metrics.count_up_to(name, total)
        if pool.residency is not None:
            metrics.block_stays(pool.residency)
        for request in live.take_ended():
            metrics.finished(request, self._parts.clock())
        if self._loras is not None:
            metrics.loras(live)
        events = self._parts.kv_events
        metrics.publish(self._gauges(), events.take() if events is not None else ())

    def _gauges(self) -> dict[str, float]:
        return {
            "num_requests_running": len(self._live.running),
            "num_requests_waiting": len(self._live.waiting),
            "kv_cache_usage_perc": self._live.kv.pool.usage,
        }

    def stop(self) -> None:
        """Drop all requests and stop the executor. A second call does nothing. The engine accepts
        no requests afterwards."""
        try:
            with suppress(Exception):  # another engine may have died
                self._leave()
        finally:
            self._grammars.compiler.stop()
            self._parts.metrics.close()
            self._parts.executor.stop()
            self._life.stop("it was stopped")

    def _leave(self) -> None:
        """Take steps until the engines with which this one shares out experts need no more."""
        self._scheduler.pause(True)
        self._lockstep.leave()
        while self._lockstep.is_running and self._life.end is None:
            self.step()
