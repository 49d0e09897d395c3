"""Calls metrics sinks, so that a failure of one does no harm, and collects samples for other
processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pegboard.errors import blamed
from pegboard.interfaces.metrics import Metric, MetricsSink, Sample
from pegboard.log import get_logger

log = get_logger(__name__)

RELAY_INTERVAL_S = 0.1
"""The minimum time between two samples that are sent to another process, while the engine is busy
and no completion ends."""


class Sinks:
    """Several sinks as one. A sink that fails is switched off, with one warning. modules: as in
    `errors.blamed`."""

    def __init__(
        self, sinks: Sequence[MetricsSink] = (), modules: Callable[[], Mapping[str, str]] = dict
    ) -> None:
        self._sinks = list(sinks)
        self._modules = modules

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def add(self, sink: MetricsSink) -> None:
        """Add a sink. The caller has already declared the metrics to it."""
        self._sinks.append(sink)

    def declare(self, metrics: Sequence[Metric]) -> None:
        self._call_all("declare", metrics)

    def publish(self, sample: Sample) -> None:
        self._call_all("publish", sample)

    def close(self) -> None:
        """Stop the sinks. There are no more samples."""
        self._call_all("close")
        self._sinks.clear()

    def _call_all(self, method: str, *args: object) -> None:
        for sink in tuple(self._sinks):
            try:
                getattr(sink, method)(*args)
            except Exception as error:
                # metrics must never stop the engine or the server: any failure switches the sink
                # off
                self._sinks.remove(sink)
                failure = blamed(error, self._modules)
                name = (failure and failure.plugin) or type(sink).__name__
                log.warning(
                    "metrics sink %s failed in %s and is off for the rest of the run",
                    name,
                    method,
                    exc_info=True,
                )


class SampleRelay:
    """A sink that adds up samples until they are sent to another process. There is at most one
    message per step. While the engine is busy there is only one every RELAY_INTERVAL_S, unless a
    completion has ended: when a client has its answer, the metrics must include the request."""

    def __init__(self) -> None:
        self.metrics: Sequence[Metric] = ()
        self._sample: Sample | None = None
        self._is_due = False
        self._taken_s = 0.0

    def declare(self, metrics: Sequence[Metric]) -> None:
        self.metrics = tuple(metrics)

    def publish(self, sample: Sample) -> None:
        self._sample = merged(self._sample or Sample(sample.time_s), sample)
        is_idle = not (
            sample.gauges.get("num_requests_running") or sample.gauges.get("num_requests_waiting")
        )
        has_ended = bool(sample.requests) or "e2e_request_latency_seconds" in sample.observations
        self._is_due = (
            self._is_due
            or is_idle
            or has_ended
            or sample.time_s - self._taken_s >= RELAY_INTERVAL_S
        )

    def take(self) -> Sample | None:
        """Return the sample to send now, or None if none is due."""
        if not self._is_due or self._sample is None:
            return None
        sample = self._sample
        self._sample = None
        self._is_due = False
        self._taken_s = sample.time_s
        return sample

    def close(self) -> None:
        self._sample = None


def merged(first: Sample, second: Sample) -> Sample:
    """Combine two samples of one engine, without their KV events, which stay in the engine's
    process."""
    counters = dict(first.counters)
    for key, value in second.counters.items():
        counters[key] = counters.get(key, 0) + value
    observations = dict(first.observations)
    for key, values in second.observations.items():
        observations[key] = [*observations.get(key, ()), *values]
    return Sample(
        second.time_s,
        {**first.gauges, **second.gauges},
        counters,
        observations,
        second.engine,
        (*first.requests, *second.requests),
    )
