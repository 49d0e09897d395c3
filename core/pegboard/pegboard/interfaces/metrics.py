"""Kind `metrics`: where measurements go. Ambient: runs only when enabled. A sink that fails is
switched off, and the engine continues.

The engine measures. A sink whose spec asks for it is built in the API process instead. There it
gets the same samples a few times per second, together with what the HTTP server measures.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from pegboard.interfaces.spec import Spec

PREFIX = "vllm:"
"""The prefix that dashboards expect before the name of a metric whose `prefixed` is true. Sinks may
let the user change it."""

COMMON_LABELS = ("model_name", "engine")
"""Labels that a sink adds by itself: the served model's name, and the number of the engine, counted
from "0"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSpec(Spec):
    """process: where the sink is built. "engine": in E, where it is called at the end of every
    step. "api": in A, for sinks that HTTP clients query. Each API process has its own sink, and
    each of them gets every sample. flags: "requests" = the sink wants `Sample.requests`. "traces" =
    it exports requests as spans. "kv_events" = it publishes `Sample.kv_events`. Sinks with one of
    the last two flags also run with `disable_log_stats`."""

    FLAGS = frozenset({"requests", "traces", "kv_events"})

    process: Literal["engine", "api"] = "engine"


@dataclass(frozen=True, slots=True)
class MetricsSetup:
    """model_name: a label of every metric. engine: the number of the engine; a sink that takes a
    port in the engine's process adds it."""

    model_name: str
    engine: int = 0


@dataclass(frozen=True, slots=True)
class Metric:
    """name: without the prefix ("num_requests_running"); names of counters end in "_total".
    buckets: upper limits of a histogram's buckets, ascending, without infinity. A summary is a
    histogram without buckets: it has only a count and a sum. labels: names of the metric's own
    labels; `series` names one combination of their values. initial: combinations that exist with
    value 0 before anything is measured. common: the labels of COMMON_LABELS that a sink adds.
    prefixed: False if the name gets no prefix. latest: True for a gauge whose labels carry the
    information. Then only the combination of label values that was published last counts."""

    name: str
    type: Literal["counter", "gauge", "histogram", "summary"]
    help: str
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    initial: tuple[tuple[str, ...], ...] = ()
    common: tuple[str, ...] = COMMON_LABELS
    prefixed: bool = True
    latest: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request that has ended, with all its completions. Times are seconds on the clock of
    `time.time()`; 0.0 means that the event did not happen.

    num_generated_tokens: of all completions together. finish_reasons: in the order in which the
    completions ended. forward_s, execute_s: seconds that the request's steps took, in the model's
    forward and in the worker as a whole. trace_headers: "traceparent" and "tracestate" of the
    client's request.
    """

    request_id: str
    arrival_s: float
    first_scheduled_s: float
    first_token_s: float
    last_token_s: float
    finished_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    finish_reasons: tuple[str, ...]
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    lora_name: str | None = None
    forward_s: float = 0.0
    execute_s: float = 0.0
    trace_headers: Mapping[str, str] | None = None


class BlocksStored(msgspec.Struct, frozen=True, tag=True):
    """Consecutive blocks of a request that the prefix cache can find from now on.

    block_hashes: one for each `block_size` tokens of `token_ids`. parent_hash: of the block before
    them; None if they start the request. group: the KV group. cache_salt: only if they start the
    request, because later hashes depend on the first. medium: where they are; None = in the KV
    cache, and a KV connector names its memory.
    """

    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    group: int = 0
    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    medium: str | None = None


class BlocksRemoved(msgspec.Struct, frozen=True, tag=True):
    """Blocks that a memory has dropped. medium: as in `BlocksStored`."""

    block_hashes: tuple[bytes, ...]
    group: int = 0
    medium: str | None = None


class BlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The prefix cache was reset. Nothing is known of other memories either, until they store."""


KVEvent = BlocksStored | BlocksRemoved | BlocksCleared


@dataclass(slots=True)
class Sample:
    """What has changed since the last publish: gauges as values, counters as increments, histograms
    as observations.

    The keys are names of series: the metric's name, or the result of `series`. engine: number of
    the engine that was measured. requests: the requests that have ended, if a sink's spec asks for
    them. kv_events: changes of the prefix cache and of connectors' memories, in order, if a sink's
    spec asks for them and the sink is built in the engine process. Only blocks of tokens have
    events, not states.
    """

    time_s: float
    gauges: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    observations: Mapping[str, Sequence[float]] = field(default_factory=dict)
    engine: int = 0
    requests: Sequence[RequestRecord] = ()
    kv_events: Sequence[KVEvent] = ()


class MetricsSink(Protocol):
    def declare(self, metrics: Sequence[Metric]) -> None:
        """Take the definitions of all metrics. Called once, before the first publish."""

    def publish(self, sample: Sample) -> None:
        """Take a sample. Called at most once per step, and whenever the engine becomes idle. Must
        not block."""

    def close(self) -> None:
        """Flush. Called once."""


def series(name: str, *values: str) -> str:
    """Return the name of one series of a metric with labels: `series("request_success_total",
    "stop")`."""
    return "|".join((name, *(value.replace("%", "%25").replace("|", "%7C") for value in values)))


def split_series(key: str) -> tuple[str, tuple[str, ...]]:
    """Split the name of a series into the metric's name and the label values."""
    name, *values = key.split("|")
    return name, tuple(value.replace("%7C", "|").replace("%25", "%") for value in values)


@dataclass(slots=True)
class Reading:
    """The state of one series. value: of a counter or gauge, or the sum of the observations. count:
    number of observations. bucket_counts: number of observations in each bucket (not cumulative),
    with one more entry than there are buckets."""

    metric: Metric
    engine: int
    labels: tuple[str, ...]
    value: float = 0.0
    count: int = 0
    bucket_counts: list[int] = field(default_factory=list)


class Totals:
    """Adds up samples, for sinks that answer requests. Metrics that are not declared are
    skipped. first: the number of the first engine, which also has the metrics without this
    label."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._metrics: dict[str, Metric] = {}
        self._readings: dict[tuple[int, str], Reading] = {}
        self._engines: set[int] = set()

    def declare(self, metrics: Sequence[Metric]) -> None:
        """Create the first engine's series whose labels are known. Those of any other engine are
        created with its first sample."""
        self._metrics.update((metric.name, metric) for metric in metrics)
        self._engines.discard(self._first)
        self._open(self._first)

    def publish(self, sample: Sample) -> None:
        """Add a sample."""
        engine = sample.engine
        if engine not in self._engines:
            self._open(engine)
        for key, value in sample.gauges.items():
            if (reading := self._reading(engine, key)) is not None:
                if reading.metric.latest:
                    self._retire(reading)
                reading.value = value
        for key, value in sample.counters.items():
            if (reading := self._reading(engine, key)) is not None:
                reading.value += value
        for key, values in sample.observations.items():
            if (reading := self._reading(engine, key)) is not None:
                _observe(reading, values)

    def close(self) -> None:
        """Do nothing: the totals stay readable."""

    def readings(self) -> Iterator[tuple[Metric, list[Reading]]]:
        """Yield every declared metric with its series, in the order of declaration."""
        readings: dict[str, list[Reading]] = {name: [] for name in self._metrics}
        for reading in self._readings.values():
            readings[reading.metric.name].append(reading)
        for name, metric in self._metrics.items():
            yield metric, readings[name]

    def _open(self, engine: int) -> None:
        self._engines.add(engine)
        for metric in self._metrics.values():
            if "engine" in metric.common or engine == self._first:
                for values in metric.initial or (() if metric.labels else ((),)):
                    self._reading(engine, series(metric.name, *values))

    def _reading(self, engine: int, key: str) -> Reading | None:
        reading = self._readings.get((engine, key))
        if reading is None:
            name, labels = split_series(key)
            metric = self._metrics.get(name)
            if metric is None or len(labels) != len(metric.labels):
                return None
            counts = [0] * (len(metric.buckets) + 1) if metric.type == "histogram" else []
            reading = self._readings[engine, key] = Reading(
                metric, engine, labels, bucket_counts=counts
            )
        return reading

    def _retire(self, latest: Reading) -> None:
        for place, reading in list(self._readings.items()):
            if (
                reading is not latest
                and reading.metric is latest.metric
                and reading.engine == latest.engine
            ):
                del self._readings[place]


def _observe(reading: Reading, values: Sequence[float]) -> None:
    reading.value += sum(values)
    reading.count += len(values)
    if counts := reading.bucket_counts:
        buckets = reading.metric.buckets
        for value in values:
            counts[bisect_left(buckets, value)] += 1
