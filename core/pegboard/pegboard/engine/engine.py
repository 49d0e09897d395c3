"""The engine takes requests, runs one step at a time and returns deltas. It owns all mutable state.

    step():  fill the in-flight queue → take the oldest step → give it its token masks → apply its
    result

Only one thread may call it. It knows nothing about text, HTTP or torch.
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
from pegboard.data.request import EngineRequest, LoRARequest, RequestDelta
from pegboard.engine.grammar.compiler import GrammarCompiler
from pegboard.engine.grammar.grammars import Grammars
from pegboard.engine.kv.cache import KVCache
from pegboard.engine.loras import LoRASlots
from pegboard.engine.metrics.step import StepMetrics
from pegboard.engine.pauses import Pauses
from pegboard.engine.queues import KVConnectors, Queues
from pegboard.engine.requests import check_request, completions_of
from pegboard.engine.scheduler import Scheduler
from pegboard.engine.weight_updates import WeightUpdates, no_checkpoint
from pegboard.engine.worker_calls import WorkerCalls
from pegboard.errors import (
    EngineDeadError,
    Overloaded,
    PegboardError,
    RequestError,
    blamed,
    culprit,
    expect,
)
from pegboard.interfaces.attention import KVPlan
from pegboard.interfaces.executor import Executor, StepFuture, WorkerDeath
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
        self._has_priority = has_priority
        self._embedding_size = embedding_size
        self._clock = clock
        self._kv = KVCache(kv_plan, limits)
        if kv_events:
            self._kv.pool.events = []
        self._queues = Queues(
            limits,
            self._kv,
            policy,
            KVConnectors(connectors or {}, self._kv),
            clock,
            self._call_adapters,
        )
        self._metrics = metrics or StepMetrics(limits)
        self._scheduler = Scheduler(limits, self._queues, self._grammars, self._metrics)
        self._in_flight: deque[tuple[Batch, StepFuture]] = deque()
        self._drains = False  # an adapter waits until no step is in flight
        self._dead: str | None = None
        self._plugin_modules = plugin_modules or {}
        self._pauses = Pauses(
            self._queues,
            self._scheduler,
            enter=self._enter,
            finish_steps=self._finish_steps,
            reset=self._reset_prefix_cache,
            call=executor.call,
            report=self._report_sleep,
            can_sleep=can_sleep,
        )
        updates = WeightUpdates(
            self._queues,
            self._pauses,
            describe=describe_update,
            call=executor.call,
            dying=self._dying,
        )
        workers = WorkerCalls(finish_steps=self._finish_steps, call=executor.call)
        self._actions: dict[str, Callable[..., Any]] = {
            "stats": self.stats,
            "reset_prefix_cache": self._reset_prefix_cache,
            "call": workers.call,
            "collective_rpc": workers.collective_rpc,
            "update_weights": updates.update,
            "pause": self._pauses.pause,
            "resume": self._pauses.resume,
            "is_paused": lambda: self._pauses.mode is not None,
            "sleep": self._pauses.sleep,
            "wake_up": self._pauses.wake_up,
            "is_sleeping": lambda: self._pauses.is_sleeping,
            "decisions": decisions,
            "add_lora": lambda lora: self._loras().add(msgspec.convert(lora, LoRARequest)),
            "remove_lora": lambda lora_id: self._loras().remove(lora_id),
            "pin_lora": lambda lora_id: self._loras().pin(lora_id),
            "list_loras": lambda: self._loras().ids(),
        }
        executor.watch(self._on_death)

    # --- requests ---------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Add a request. `params.n` > 1 becomes n completions. Raises RequestError if the request
        cannot be served (the prompt is empty or too long, a token id is outside the vocabulary, the
        request id is in use, …), and Overloaded if the queue is full."""
        self._must_live()
        if (
            request.request_id in self._queues.completions
            or request.request_id in self._pauses.held
        ):
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
        waiting = self._num_waiting
        if waiting + request.params.n > most:
            raise Overloaded(
                f"{waiting} completions are waiting, the limit is {most}; try again later"
            )
        if not request.arrival_s:
            request = msgspec.structs.replace(request, arrival_s=self._clock())
        if request.lora is not None:
            request = msgspec.structs.replace(request, lora=self._queues.loras.arrive(request.lora))
        if self._pauses.mode is not None:
            self._pauses.held[request.request_id] = request
        else:
            self._enter(request)

    def _enter(self, request: EngineRequest) -> None:
        with self._dying():
            for completion in completions_of(request):
                if request.params.structured_outputs is not None:
                    self._grammars.start(completion)
                self._queues.add(completion)

    def abort(self, request_ids: Sequence[str], reason: Literal["abort", "stop"] = "abort") -> None:
        """End requests with all their completions, or single completions by key. The next step
        returns their last delta. Unknown ids are ignored, because the request may just have
        finished. reason: the finish reason."""
        with self._dying():
            for name in request_ids:
                if (held := self._pauses.held.pop(name, None)) is not None:
                    self._enter(held)
                completions = self._queues.completions.get(name) or filter(
                    None, [self._queues.requests.get(name)]
                )
                for request in list(completions):
                    self._queues.fail(request, reason)

    # --- the loop ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: requests, steps in flight, open KV transfers, deltas
        to return, or a death."""
        queues = self._queues
        can_run = bool(queues.requests) and not self._scheduler.is_paused
        return bool(
            can_run or self._in_flight or queues.deltas or queues.is_transferring or self._dead
        )

    def step(self) -> list[RequestDelta]:
        """Submit steps while possible, apply the oldest result, and return the deltas of the
        requests."""
        with self._dying():
            most = 1 if self._drains else self.limits.max_in_flight
            while len(self._in_flight) < most and (batch := self._schedule()):
                future = expect(self._executor.submit(batch), StepFuture, self._executor, "submit")
                self._in_flight.append((batch, future))
            if self._in_flight:
                self._finish_oldest()
            elif not self._queues.deltas:
                self._grammars.compiler.wait(GRAMMAR_NAP_S)
                if self.limits.max_loras:
                    self._queues.loras.wait()
                if self._queues.connectors:
                    time.sleep(CONNECTOR_NAP_S)
            self._publish()
            deltas = self._queues.deltas
            self._queues.deltas = []
            return deltas

    def _schedule(self) -> Batch | None:
        self._drains = False
        with self._metrics.timed("schedule"):
            return self._scheduler.schedule()

    def _call_adapters(self, method: str, *args: object) -> list[object] | None:
        """Call a worker method about adapters on all ranks. Return None and do nothing while steps
        are in flight; no step starts before they have ended."""
        self._drains = bool(self._in_flight)
        return None if self._drains else self._executor.call(method, *args)

    def _finish_oldest(self) -> None:
        batch, future = self._in_flight.popleft()
        if batch.needs_masks:
            self._send_masks(batch)
        with self._metrics.timed("execute"):
            output = expect(future.result(), StepOutput, self._executor, "submit().result")
        with self._metrics.timed("apply"):
            self._scheduler.update(batch, output)

    def _send_masks(self, batch: Batch) -> None:
        """Send the token masks of the oldest step. All earlier steps have been applied, so the
        grammars are up to date. The forward of the step runs at the same time."""
        by_row = self._queues.by_row
        draining = self._queues.draining
        live = [by_row[row] if by_row[row] not in draining else None for row in batch.rows.tolist()]
        started = time.perf_counter()
        masks = self._grammars.masks(batch, live, self._scheduler.drafts(batch.step))
        self._metrics.spent("structured_output", time.perf_counter() - started)
        self._executor.provide_masks(batch.step, masks)

    # --- metrics ----------------------------------------------------------------------------------

    def _publish(self) -> None:
        metrics = self._metrics
        queues = self._queues
        for name, total in queues.totals.items():
            metrics.count_up_to(name, total)
        if self._kv.pool.residency is not None:
            metrics.block_stays(self._kv.pool.residency)
        ended = queues.ended
        queues.ended = []
        for request in ended:
            metrics.finished(request, self._clock())
        if self.limits.max_loras:
            metrics.loras(queues.running, queues.requests)
            self._drop_adapters()
        metrics.publish(self._gauges(), self._kv.take_events())

    def _report_sleep(self, level: int | None) -> None:
        self._metrics.sleeps(level)
        self._publish()

    @property
    def _num_waiting(self) -> int:
        return self._queues.num_waiting + sum(
            request.params.n for request in self._pauses.held.values()
        )

    def _gauges(self) -> dict[str, float]:
        return {
            "num_requests_running": len(self._queues.running),
            "num_requests_waiting": self._num_waiting,
            "kv_cache_usage_perc": self._kv.pool.usage,
        }

    def attach(self, sink: MetricsSink) -> None:
        """Add a sink. It receives the declared metrics and the current state at once."""
        self._metrics.attach(sink, self._gauges())

    # --- control ----------------------------------------------------------------------------------

    def control(self, action: str, **arguments: Any) -> Any:
        """Run a named action between two steps. Raises RequestError if there is no such action."""
        self._must_live()
        if action not in self._actions:
            raise RequestError(
                f"unknown action {action!r}; there are {', '.join(self._actions)}",
                parameter="action",
            )
        found = self._actions[action](**arguments)
        self._drop_adapters()
        return found

    def stats(self) -> dict[str, Any]:
        """Return current numbers, totals since the start, and how many blocks each running request
        holds in each KV group."""
        kv = self._kv
        running = self._queues.running
        return {
            **self._gauges(),
            **self._queues.totals,
            "num_steps_in_flight": len(self._in_flight),
            "num_blocks": kv.pool.num_blocks,
            "num_free_blocks": kv.pool.num_free,
            "num_cached_blocks": kv.pool.num_cached,
            "blocks_of": {
                request.key: [len(table) - table.count(0) for table in kv.tables(request)]
                for request in running
            },
        }

    def _reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks. Return False and do nothing while requests hold blocks, unless
        `reset_running_requests` makes them recompute."""
        if reset_running_requests:
            with self._dying():
                while self._in_flight:
                    self._finish_oldest()
                for request in list(self._queues.running):
                    self._queues.preempt(request)
                while self._queues.reclaim():
                    pass
        is_reset = self._kv.pool.reset()
        if is_reset:
            self._queues.connectors.reset()
            self._publish()
        return is_reset

    def _drop_adapters(self) -> None:
        """Let the workers forget the adapters that are not needed any more, unless steps are in
        flight."""
        if self._queues.loras.dropped and not self._in_flight:
            dropped = self._queues.loras.dropped
            self._queues.loras.dropped = []
            self._executor.call("drop_adapters", dropped)

    def _loras(self) -> LoRASlots:
        """Return the adapters, after all steps have ended. Raises RequestError if LoRA is off."""
        if not self.limits.max_loras:
            raise RequestError(
                "LoRA is off; start with enable_lora or max_loras of at least 1",
                parameter="lora_request",
            )
        self._finish_steps()
        return self._queues.loras

    def _finish_steps(self) -> None:
        """End the steps in flight. They may wait for masks, and only this thread sends them."""
        with self._dying():
            while self._in_flight:
                self._finish_oldest()

    def stop(self) -> None:
        """Drop all requests and stop the executor. A second call does nothing. The engine accepts
        no requests afterwards."""
        self._grammars.compiler.stop()
        self._metrics.close()
        self._executor.stop()
        self._dead = self._dead or "it was stopped"

    # --- death ------------------------------------------------------------------------------------

    def _must_live(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine is dead: {self._dead}")

    def _on_death(self, death: WorkerDeath) -> None:
        plugin = (
            culprit(self._plugin_modules, [type(self._executor).__module__])
            or type(self._executor).__name__
        )
        self._dead = f"{plugin} reports that worker {death.rank} died: {death.reason}"

    @contextmanager
    def _dying(self) -> Iterator[None]:
        """Change the engine's state in the block. After an error in it the state is unknown, so the
        engine is dead."""
        self._must_live()
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised again
            failure = self._blamed(error)
            self._dead = self._dead or f"{type(failure).__name__}: {failure}"
            raise failure from failure.__cause__

    def _blamed(self, error: BaseException) -> BaseException:
        """Return a PluginFailure if the error came from the code of a plugin or from what a plugin
        returned, and EngineDeadError if it came from anywhere else. Pegboard's own errors are
        returned as they are."""
        failure: PegboardError | None = blamed(error, lambda: self._plugin_modules)
        if failure is None and (
            isinstance(error, PegboardError) or not isinstance(error, Exception)
        ):
            return error
        if failure is None:
            failure = EngineDeadError(f"a step failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        return failure
