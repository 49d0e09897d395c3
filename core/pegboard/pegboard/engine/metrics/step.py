"""The engine's measurements. They are collected during a step and published once at its end. There
is also one record per request that ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pegboard.config.limits import Limits
from pegboard.data.batch import Batch, StepTimes
from pegboard.engine.kv.residency import BlockResidency
from pegboard.engine.metrics.catalogue import ROWS, by_label, engine_metrics
from pegboard.engine.metrics.sinks import Sinks
from pegboard.engine.requests import Request
from pegboard.interfaces.metrics import (
    KVEvent,
    MetricsSink,
    RequestRecord,
    Sample,
    series,
    split_series,
)
from pegboard.interfaces.scheduling_policy import RequestStatus

SLEEP_STATES = by_label("engine_sleep_state")
SUCCESS = by_label("request_success_total")
BY_SOURCE = by_label("prompt_tokens_by_source_total")
PARTS = by_label("pegboard_step_seconds_total")


class StepMetrics:
    """Counts and observations since they were last published. All times are on the engine's clock.
    plugin_names: kind → names of the plugins in use. wants_records: a sink needs `Sample.requests`.
    cache_config, show_hidden: see `engine_metrics`. modules: see `Sinks`. engine: the engine's
    number. A name that is not in the catalogue is an error.
    """

    def __init__(
        self,
        limits: Limits,
        sinks: Sequence[MetricsSink] = (),
        *,
        clock: Callable[[], float] = time.time,
        plugin_names: Mapping[str, str] | None = None,
        wants_records: bool = False,
        cache_config: Mapping[str, str] | None = None,
        show_hidden: str | None = None,
        modules: Callable[[], Mapping[str, str]] = dict,
        engine: int = 0,
    ) -> None:
        self._engine = engine
        self.metrics = engine_metrics(limits, cache_config=cache_config, show_hidden=show_hidden)
        self._limits = limits
        self._sinks = Sinks(sinks, modules)
        self._clock = clock
        self._counters: dict[str, float] = {}
        self._observations: dict[str, list[float]] = {}
        self._known: set[str] = set()
        self._num_generated = 0
        self._latencies: list[float] = []
        self._totals: dict[str, float] = {}
        self._info: dict[str, float] = {}
        self._news: dict[str, float] = {}
        self.sleeps(None)
        self._lora_info = ""
        self._ended: list[RequestRecord] = []
        self._open: dict[str, _OpenRequest] = {}
        self._wants_records = wants_records
        self._hidden = {
            row["same_as"]: each.name
            for each in self.metrics
            if "same_as" in (row := ROWS[each.name])
        }
        names = plugin_names or {}
        self._plugin_keys = {
            kind: series("pegboard_plugin_seconds_total", kind, names[kind], part)
            for kind, part in ROWS["pegboard_plugin_seconds_total"]["parts"].items()
            if names.get(kind)
        }
        if cache_config:
            self._inform({series("cache_config_info", *cache_config.values()): 1.0})
        self._sinks.declare(self.metrics)

    def _inform(self, gauges: Mapping[str, float]) -> None:
        """Set gauges that rarely change. They are published once, and again to every sink that is
        attached later."""
        self._info.update(gauges)
        self._news.update(gauges)

    def sleeps(self, level: int | None) -> None:
        """Set the sleep level of the engine. None = it is awake."""
        state = {None: "awake", 1: "weights_offloaded", 2: "discard_all"}.get(level)
        self._inform({key: float(name == state) for name, key in SLEEP_STATES.items()})

    def attach(self, sink: MetricsSink, gauges: Mapping[str, float]) -> None:
        """Add a sink and publish the engine's current state to it."""
        late = Sinks([sink])
        late.declare(self.metrics)
        late.publish(Sample(self._clock(), {**self._info, **gauges}, engine=self._engine))
        if late:
            self._sinks.add(sink)

    def count(self, name: str, n: float = 1) -> None:
        """Add to a counter."""
        self._counters[name] = self._counters.get(name, 0) + n

    def count_up_to(self, name: str, total: float) -> None:
        """Raise a counter to `total`, which is counted elsewhere."""
        before = self._totals.get(name, 0)
        if total != before:
            self._totals[name] = total
            self.count(name, total - before)

    def observe(self, name: str, value: float) -> None:
        """Add an observation to a histogram."""
        self._observations.setdefault(name, []).append(value)

    # --- a step -----------------------------------------------------------------------------------

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Measure a part of the engine's loop."""
        started = time.perf_counter()
        yield
        self.count(PARTS[part], time.perf_counter() - started)

    def step(self, batch: Batch, times: StepTimes, by_row: Sequence[Request | None]) -> None:
        """Count the size of a step and the times of its parts. The result has arrived but is not
        applied yet. The time is added once to each request, however many of its completions took
        part."""
        self.observe("iteration_tokens_total", batch.num_tokens)
        self.spent("attention", times.plan_s)
        self.spent("model", times.forward_s - times.plan_s)
        self.spent("sampler", times.sample_s)
        self.spent("draft", times.draft_s)
        self.spent("kv_connector", times.transfer_s)
        if self._wants_records:
            rows = (by_row[row] for row in batch.rows.tolist())
            for name in {
                request.request_id
                for request in rows
                if request is not None and not request.is_finished
            }:
                entry = self._open.setdefault(name, _OpenRequest())
                entry.forward_s += times.forward_s
                entry.execute_s += times.total_s

    def spent(self, kind: str, seconds: float) -> None:
        """Add the seconds that the plugins of a kind took for their part of the step (`parts` in
        the catalogue)."""
        if (key := self._plugin_keys.get(kind)) is not None:
            self.count(key, seconds)

    def tokens(self, request: Request, num_tokens: int, now_s: float) -> None:
        """Count new tokens of a completion."""
        self._num_generated += num_tokens  # called once per row and step, so it must be cheap
        if request.first_token_s:
            self._latencies.append(now_s - request.last_token_s)
        else:
            request.first_token_s = now_s
            cached = request.num_cached_tokens or 0
            external = request.num_external_tokens
            self.count("prompt_tokens_total", request.num_prompt_tokens)
            self.count("prompt_tokens_cached_total", cached)
            self.count(BY_SOURCE["local_compute"], request.num_prompt_tokens - cached)
            self.count(BY_SOURCE["local_cache_hit"], cached - external)
            self.count(BY_SOURCE["external_kv_transfer"], external)
            self.observe("time_to_first_token_seconds", now_s - request.arrival_s)
        request.last_token_s = now_s

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts that a row has verified."""
        self.count("spec_decode_num_drafts_total")
        self.count("spec_decode_num_draft_tokens_total", num_drafts)
        self.count("spec_decode_num_accepted_tokens_total", num_accepted)
        for position in range(num_accepted):
            self.count(series("spec_decode_num_accepted_tokens_per_pos_total", str(position)))

    def block_stays(self, residency: BlockResidency) -> None:
        """Record how long the KV blocks stayed that have lost their content since the last call."""
        for name, values in (
            ("kv_block_lifetime_seconds", residency.lifetimes),
            ("kv_block_idle_before_evict_seconds", residency.idle_times),
            ("kv_block_reuse_gap_seconds", residency.reuse_gaps),
        ):
            if values:
                self._observations.setdefault(name, []).extend(values)
        residency.clear()

    # --- an end -----------------------------------------------------------------------------------

    def finished(self, request: Request, now_s: float) -> None:
        """Record that a completion has ended, for any reason. If it never got a row or a first
        token, the histograms of those times leave it out."""
        self.count(SUCCESS[request.finish_reason or "abort"])
        self.observe("e2e_request_latency_seconds", now_s - request.arrival_s)
        self.observe("request_prompt_tokens", request.num_prompt_tokens)
        self.observe("request_generation_tokens", request.num_output_tokens)
        self.observe("request_num_preemptions", request.num_preemptions)
        if request.params.max_tokens is not None:
            self.observe("request_params_max_tokens", request.params.max_tokens)
        if request.first_scheduled_s:
            self.observe(
                "request_queue_time_seconds", request.first_scheduled_s - request.arrival_s
            )
        if request.first_token_s:
            self._times(request)
        entry = self._open.setdefault(request.request_id, _OpenRequest())
        entry.ended.append(request)
        if len(entry.ended) == request.params.n:
            del self._open[request.request_id]
            self.observe("request_params_n", request.params.n)
            self.observe(
                "request_max_num_generation_tokens",
                max(each.num_output_tokens for each in entry.ended),
            )
            if self._wants_records:
                self._ended.append(entry.record(now_s))

    def _times(self, request: Request) -> None:
        decode_s = request.last_token_s - request.first_token_s
        self.observe(
            "request_prefill_time_seconds", request.first_token_s - request.first_scheduled_s
        )
        self.observe("request_decode_time_seconds", decode_s)
        self.observe(
            "request_inference_time_seconds", request.last_token_s - request.first_scheduled_s
        )
        self.observe(
            "request_prefill_kv_computed_tokens",
            request.num_prompt_tokens - (request.num_cached_tokens or 0),
        )
        if request.num_output_tokens > 1:
            self.observe(
                "request_time_per_output_token_seconds", decode_s / (request.num_output_tokens - 1)
            )

    # --- out --------------------------------------------------------------------------------------

    def loras(self, requests: Iterable[Request]) -> None:
        """Record which adapters are in use. This is published only when it changes."""
        here: set[str] = set()
        other: set[str] = set()
        for request in requests:
            if request.lora is not None:
                (here if request.status is RequestStatus.RUNNING else other).add(
                    request.lora.lora_name
                )
        key = series(
            "lora_requests_info",
            str(self._limits.max_loras),
            ",".join(sorted(other)),
            ",".join(sorted(here)),
        )
        if key != self._lora_info:
            self._info.pop(self._lora_info, None)
            self._lora_info = key
            self._inform({key: self._clock()})

    def publish(self, gauges: Mapping[str, float], kv_events: Sequence[KVEvent] = ()) -> None:
        """Publish everything that was collected to every sink, with the events of the prefix cache,
        and start over."""
        if self._num_generated:
            self.count("generation_tokens_total", self._num_generated)
        if self._latencies:
            self._observations["inter_token_latency_seconds"] = self._latencies
        if self._sinks:
            for name, old in self._hidden.items():
                if name in self._observations:
                    self._observations[old] = self._observations[name]
            gauges = {**self._news, **gauges}
            self._news = {}
            for keys in (gauges.keys(), self._counters.keys(), self._observations.keys()):
                if not keys <= self._known:
                    self._check(keys)
            sample = Sample(self._clock(), gauges, self._counters, self._observations)
            sample.engine = self._engine
            sample.requests = tuple(self._ended)
            sample.kv_events = kv_events
            self._sinks.publish(sample)
        self._counters = {}
        self._observations = {}
        self._ended = []
        self._num_generated = 0
        self._latencies = []

    def _check(self, keys: Collection[str]) -> None:
        """Check that these names are in the catalogue, and remember them. A name that is not is a
        mistake in the engine."""
        names = {metric.name: metric for metric in self.metrics}
        for name, labels in map(split_series, keys):
            assert name in names and len(labels) == len(names[name].labels), (
                f"metric {name!r} {labels} is not in the catalogue"
            )
        self._known.update(keys)

    def close(self) -> None:
        """Close the sinks. There are no more samples."""
        self._sinks.close()


@dataclass(slots=True)
class _OpenRequest:
    """A request with running completions. ended: the completions that have ended. forward_s,
    execute_s: seconds, summed over the steps that the request took part in."""

    ended: list[Request] = field(default_factory=list)
    forward_s: float = 0.0
    execute_s: float = 0.0

    def record(self, now_s: float) -> RequestRecord:
        """Return the record of the request. Its last completion has just ended."""
        ended = self.ended
        request = self.ended[-1]
        params = request.params
        return RequestRecord(
            request_id=request.request_id,
            arrival_s=request.arrival_s,
            first_scheduled_s=min(
                filter(None, (each.first_scheduled_s for each in ended)), default=0.0
            ),
            first_token_s=min(filter(None, (each.first_token_s for each in ended)), default=0.0),
            last_token_s=max(each.last_token_s for each in ended),
            finished_s=now_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=next(
                each.num_cached_tokens or 0 for each in ended if each.index == 0
            ),
            num_generated_tokens=sum(each.num_output_tokens for each in ended),
            finish_reasons=tuple(each.finish_reason or "abort" for each in ended),
            n=len(ended),
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            lora_name=request.lora.lora_name if request.lora is not None else None,
            forward_s=self.forward_s,
            execute_s=self.execute_s,
            trace_headers=request.trace_headers,
        )
