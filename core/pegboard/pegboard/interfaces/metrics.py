"""Kind `metrics`: where measurements go. Ambient: runs only when enabled. A failing sink is switched off; that is never fatal.

The engine measures; a sink that says so in its spec is built in the API process instead and gets the same samples there, a few
times per second, together with what the HTTP server measures.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pegboard.interfaces.spec import Spec

PREFIX = "vllm:"
"""What dashboards expect before the name of a metric whose `prefixed` is true. Sinks may let the user change it."""

COMMON_LABELS = ("model_name", "engine")
"""Labels a sink adds by itself: the served model's name and the number of the engine, from "0"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSpec(Spec):
    """process: where the sink is built. "engine": in E, it is called at the end of every step. "api": in A, for sinks that HTTP
    clients ask; each API process has its own and all of them get every sample.
    flags: "requests" = wants `Sample.requests`; "traces" = exports requests as spans: the setting `otlp_traces_endpoint` enables
        the sink and becomes its option `endpoint`, `collect_detailed_traces` its option `collect`."""

    FLAGS = frozenset({"requests", "traces"})

    process: Literal["engine", "api"] = "engine"


@dataclass(frozen=True, slots=True)
class MetricsSetup:
    """model_name: label of every metric."""

    model_name: str


@dataclass(frozen=True, slots=True)
class Metric:
    """name: without prefix ("num_requests_running"); counters end in "_total". buckets: of histograms, ascending, no infinity.

    A summary is a histogram without buckets: number and sum. labels: names of the metric's own labels; `series` names one
    combination of their values. initial: combinations that exist, with value 0, before anything is measured. common: which of
    COMMON_LABELS a sink adds. prefixed: False = the name is complete as it is. latest: of all combinations of label values only
    the one that was published last is true (a gauge whose labels carry the information).
    """

    name: str
    type: Literal["counter", "gauge", "histogram", "summary"]
    help: str
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    initial: tuple[tuple[str, ...], ...] = ()
    common: tuple[str, ...] = COMMON_LABELS
    prefixed: bool = True
    latest: bool = False

    @property
    def is_distribution(self) -> bool:
        """Fed by observations."""
        return self.type in ("histogram", "summary")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request that has ended, with all its completions. Times are seconds on the clock of `time.time()`; 0.0: it never
    happened.

    num_generated_tokens: of all completions together. finish_reasons: in the order in which the completions ended.
    forward_s, execute_s: time of the steps it took part in, in the model's forward and in the worker altogether.
    trace_headers: "traceparent" and "tracestate" of the client's request.
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


@dataclass(slots=True)
class Sample:
    """What changed since the last publish: gauges by value, counters by increment, histograms by observations.

    Keys are names of series: the metric's name, or what `series` makes of it. engine: whose sample it is. requests: those that
    ended, if the sink's spec asks for them.
    """

    time_s: float
    gauges: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    observations: Mapping[str, Sequence[float]] = field(default_factory=dict)
    engine: int = 0
    requests: Sequence[RequestRecord] = ()


class MetricsSink(Protocol):
    def declare(self, metrics: Sequence[Metric]) -> None:
        """Once, before the first publish."""

    def publish(self, sample: Sample) -> None:
        """At most once per step and whenever the engine goes idle. Must not block."""

    def close(self) -> None:
        """Flush; called once."""


def series(name: str, *values: str) -> str:
    """The name of one series of a labelled metric: `series("request_success_total", "stop")`."""
    return "|".join((name, *(value.replace("%", "%25").replace("|", "%7C") for value in values)))


def split_series(key: str) -> tuple[str, tuple[str, ...]]:
    """The metric's name and the label values of a series."""
    name, *values = key.split("|")
    return name, tuple(value.replace("%7C", "|").replace("%25", "%") for value in values)


@dataclass(slots=True)
class Reading:
    """The state of one series. value: of a counter or gauge, or the sum of the observations. count: how many there were;
    bucket_counts: how many fell into each bucket (not cumulative), one more than there are buckets."""

    metric: Metric
    engine: int
    labels: tuple[str, ...]
    value: float = 0.0
    count: int = 0
    bucket_counts: list[int] = field(default_factory=list)


class Totals:
    """Adds up samples, for sinks that answer requests. An undeclared metric is skipped."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._readings: dict[tuple[int, str], Reading] = {}
        self._engines: set[int] = set()

    def declare(self, metrics: Sequence[Metric]) -> None:
        """Engine 0's series with known labels exist from now on; another engine's from its first sample on."""
        self._metrics.update((metric.name, metric) for metric in metrics)
        self._engines.discard(0)
        self._open(0)

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
        """The totals stay readable."""

    def readings(self) -> Iterator[tuple[Metric, list[Reading]]]:
        """Every declared metric with its series, in the order of declaration."""
        found: dict[str, list[Reading]] = {name: [] for name in self._metrics}
        for reading in self._readings.values():
            found[reading.metric.name].append(reading)
        for name, metric in self._metrics.items():
            yield metric, found[name]

    def _open(self, engine: int) -> None:
        self._engines.add(engine)
        for metric in self._metrics.values():
            if "engine" in metric.common or engine == 0:
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
            reading = self._readings[engine, key] = Reading(metric, engine, labels, bucket_counts=counts)
        return reading

    def _retire(self, latest: Reading) -> None:
        for place, reading in list(self._readings.items()):
            if reading is not latest and reading.metric is latest.metric and reading.engine == latest.engine:
                del self._readings[place]


def _observe(reading: Reading, values: Sequence[float]) -> None:
    reading.value += sum(values)
    reading.count += len(values)
    if counts := reading.bucket_counts:
        buckets = reading.metric.buckets
        for value in values:
            counts[bisect_left(buckets, value)] += 1
