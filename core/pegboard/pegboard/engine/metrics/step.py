"""Measurements of the engine: gathered during a step, published once at its end. A sink that fails is switched off, once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from pegboard.data.batch import Batch, StepTimes
from pegboard.data.request import Request
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.kv.residency import BlockResidency
from pegboard.engine.metrics.catalogue import (
    BY_SOURCE,
    PLUGIN_SECONDS,
    SAME_AS,
    STEP_PARTS,
    STEP_SECONDS,
    SUCCESS,
    MeasuredEngine,
    engine_metrics,
)
from pegboard.engine.metrics.records import RequestRecords
from pegboard.engine.metrics.sinks import Sinks
from pegboard.interfaces.metrics import MetricsSink, RequestRecord, Sample, series

PARTS = {part: series(STEP_SECONDS, part) for part in STEP_PARTS}


class StepMetrics:
    """Counts and observations since the last publish. All times are on the engine's clock.

    wants_records: some sink asks for `Sample.requests`. Without sinks nothing is gathered.
    """

    def __init__(
        self,
        sinks: Sequence[MetricsSink],
        clock: Callable[[], float],
        engine: MeasuredEngine,
        *,
        wants_records: bool = False,
    ) -> None:
        self.metrics = engine_metrics(engine)
        self._engine = engine
        self._sinks = Sinks(sinks)
        self._clock = clock
        self._counters: dict[str, float] = {}
        self._observations: dict[str, list[float]] = {}
        self._num_generated = 0
        self._latencies: list[float] = []
        self._totals: dict[str, float] = {}
        self._info: dict[str, float] = {}
        self._news: dict[str, float] = {}
        self._lora_info = ""
        self._ended: list[RequestRecord] = []
        self._corrupted: set[str] = set()
        self._records = RequestRecords()
        self._wants_records = wants_records
        self._hidden = {name: old for name, old in SAME_AS.items() if any(metric.name == old for metric in self.metrics)}
        names = engine.plugin_names
        self._plugin_keys = {
            (kind, part): series(PLUGIN_SECONDS, kind, names[kind], part)
            for kind, part in (
                ("attention", "plan"), ("model", "forward"), ("sampler", "sample"), ("draft", "propose"),
                ("structured_output", "masks"), ("kv_connector", "transfer"),
            )
            if names.get(kind)
        }  # fmt: skip
        if engine.cache_config:
            self.inform({series("cache_config_info", *engine.cache_config.values()): 1.0})
        self._sinks.declare(self.metrics)

    def inform(self, gauges: Mapping[str, float]) -> None:
        """Gauges that seldom change: published once, and to a sink that is attached later."""
        self._info.update(gauges)
        self._news.update(gauges)

    def attach(self, sink: MetricsSink, gauges: Mapping[str, float]) -> None:
        """One more sink, which learns at once what the others know already: the engine's state."""
        late = Sinks([sink])
        late.declare(self.metrics)
        late.publish(Sample(self._clock(), {**self._info, **gauges}))
        if late:
            self._sinks.add(sink)

    def count(self, name: str, n: float = 1) -> None:
        """Add to a counter."""
        self._counters[name] = self._counters.get(name, 0) + n

    def count_up_to(self, name: str, total: float) -> None:
        """Set a counter that is kept as a total elsewhere."""
        before = self._totals.get(name, 0)
        if total != before:
            self._totals[name] = total
            self.count(name, total - before)

    def observe(self, name: str, value: float) -> None:
        """One observation of a histogram."""
        self._observations.setdefault(name, []).append(value)

    # --- a step -------------------------------------------------------------------------------------------------------------

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """What the engine's loop spends its time with."""
        started = time.perf_counter()
        yield
        self.count(PARTS[part], time.perf_counter() - started)

    def masks_filled(self, seconds: float) -> None:
        """Grammars have filled the token masks of a step."""
        self._spent("structured_output", "masks", seconds)

    def step(self, batch: Batch, times: StepTimes, by_row: Sequence[Request | None]) -> None:
        """The result of a step is in and not applied yet: how large the step was, and what its parts cost."""
        self.observe("iteration_tokens_total", batch.num_tokens)
        self._spent("attention", "plan", times.plan_s)
        self._spent("model", "forward", times.forward_s - times.plan_s)
        self._spent("sampler", "sample", times.sample_s)
        self._spent("draft", "propose", times.draft_s)
        self._spent("kv_connector", "transfer", times.transfer_s)
        if self._wants_records:
            self._records.step(batch, times, by_row)

    def _spent(self, kind: str, part: str, seconds: float) -> None:
        if (key := self._plugin_keys.get((kind, part))) is not None:
            self.count(key, seconds)

    def tokens(self, request: Request, num_tokens: int, now_s: float) -> None:
        """A completion has gained tokens."""
        self._num_generated += num_tokens  # once per row and step: kept cheap
        if request.first_token_s:
            self._latencies.append(now_s - request.last_token_s)
        else:
            request.first_token_s = now_s
            self._prompt(request)
            self.observe("time_to_first_token_seconds", now_s - request.arrival_s)
        request.last_token_s = now_s

    def _prompt(self, request: Request) -> None:
        cached, external = request.num_cached_tokens or 0, request.num_external_tokens
        self.count("prompt_tokens_total", request.num_prompt_tokens)
        self.count("prompt_tokens_cached_total", cached)
        self.count(BY_SOURCE["local_compute"], request.num_prompt_tokens - cached)
        self.count(BY_SOURCE["local_cache_hit"], cached - external)
        self.count(BY_SOURCE["external_kv_transfer"], external)

    def drafts(self, num_drafts: int, num_accepted: int) -> None:
        """A row has verified drafts."""
        self.count("spec_decode_num_drafts_total")
        self.count("spec_decode_num_draft_tokens_total", num_drafts)
        self.count("spec_decode_num_accepted_tokens_total", num_accepted)
        for position in range(num_accepted):
            self.count(series("spec_decode_num_accepted_tokens_per_pos_total", str(position)))

    def block_stays(self, residency: BlockResidency) -> None:
        """What is known of KV blocks that lost their content since the last time."""
        for name, values in (
            ("kv_block_lifetime_seconds", residency.lifetimes),
            ("kv_block_idle_before_evict_seconds", residency.idle_times),
            ("kv_block_reuse_gap_seconds", residency.reuse_gaps),
        ):
            if values:
                self._observations.setdefault(name, []).extend(values)
        residency.clear()

    def corrupted(self, requests: Iterable[Request | None]) -> None:
        """Their logits held NaN; each counts once, when it ends."""
        self._corrupted.update(request.key for request in requests if request is not None and not request.is_finished)

    # --- an end -------------------------------------------------------------------------------------------------------------

    def finished(self, request: Request, now_s: float) -> None:
        """A completion has ended, for whatever reason. What never came (a first token, a row) is in no histogram."""
        self.count(SUCCESS[request.finish_reason or "abort"])
        if request.key in self._corrupted:
            self._corrupted.discard(request.key)
            self.count("corrupted_requests_total")
        self.observe("e2e_request_latency_seconds", now_s - request.arrival_s)
        self.observe("request_prompt_tokens", request.num_prompt_tokens)
        self.observe("request_generation_tokens", request.num_output_tokens)
        self.observe("request_num_preemptions", request.num_preemptions)
        if isinstance(request.params, SamplingParams) and request.params.max_tokens is not None:
            self.observe("request_params_max_tokens", request.params.max_tokens)
        if request.first_scheduled_s:
            self.observe("request_queue_time_seconds", request.first_scheduled_s - request.arrival_s)
        if request.first_token_s:
            self._times(request)
        ended = self._records.finished(request, now_s)
        if ended is not None:
            self.observe("request_params_n", ended.record.n)
            self.observe("request_max_num_generation_tokens", ended.longest)
            if self._wants_records:
                self._ended.append(ended.record)

    def _times(self, request: Request) -> None:
        decode_s = request.last_token_s - request.first_token_s
        self.observe("request_prefill_time_seconds", request.first_token_s - request.first_scheduled_s)
        self.observe("request_decode_time_seconds", decode_s)
        self.observe("request_inference_time_seconds", request.last_token_s - request.first_scheduled_s)
        self.observe("request_prefill_kv_computed_tokens", request.num_prompt_tokens - (request.num_cached_tokens or 0))
        if request.num_output_tokens > 1:
            self.observe("request_time_per_output_token_seconds", decode_s / (request.num_output_tokens - 1))

    # --- out ----------------------------------------------------------------------------------------------------------------

    def loras(self, running: Sequence[Request], waiting: Mapping[str, Request]) -> None:
        """Which adapters are in use; published when that changes."""
        here = {request.lora.name for request in running if request.lora is not None}
        other = {request.lora.name for request in waiting.values() if request.lora is not None and request.row is None}
        key = series("lora_requests_info", str(self._engine.max_loras), ",".join(sorted(other)), ",".join(sorted(here)))
        if key != self._lora_info:
            self._info.pop(self._lora_info, None)
            self._lora_info = key
            self.inform({key: self._clock()})

    def publish(self, gauges: Mapping[str, float]) -> None:
        """Hand everything gathered to every sink and start anew."""
        if self._num_generated:
            self.count("generation_tokens_total", self._num_generated)
        if self._latencies:
            self._observations["inter_token_latency_seconds"] = self._latencies
        if self._sinks:
            for name, old in self._hidden.items():
                if name in self._observations:
                    self._observations[old] = self._observations[name]
            gauges, self._news = {**self._news, **gauges}, {}
            self._sinks.publish(Sample(self._clock(), gauges, self._counters, self._observations, requests=tuple(self._ended)))
        self._counters, self._observations, self._ended = {}, {}, []
        self._num_generated, self._latencies = 0, []

    def close(self) -> None:
        """No more samples."""
        self._sinks.close()
