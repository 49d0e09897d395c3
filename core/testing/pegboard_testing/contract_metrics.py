"""Contract tests of the kind `metrics`. A plugin's test file:

class TestMySink(MetricsContract):
    def sink(self, setup: MetricsSetup) -> MetricsSink:
        return MySink(None, setup)
"""

from __future__ import annotations

import copy
import time

import numpy as np
import pytest

from pegboard.engine.metrics.catalogue import engine_metrics
from pegboard.interfaces.metrics import (
    Metric,
    MetricsSetup,
    MetricsSink,
    RequestRecord,
    Sample,
    series,
)
from pegboard_server.http_metrics import HTTP_METRICS
from pegboard_testing.fake_limits import fake_limits

SETUP = MetricsSetup(model_name="org/model-1")
LIMITS = fake_limits(max_model_len=4096, max_drafts=3, max_loras=2)
METRICS = engine_metrics(LIMITS, cache_config={"block_size": "16"}, show_hidden="0.12")
OWN = (
    *METRICS,
    *HTTP_METRICS,
    Metric("plugin_things_total", "counter", "Declared by another plugin"),
)


def random_series(rng: np.random.Generator, metric: Metric) -> str:
    """Pick one of the metric's series. Its label values may or may not have occurred before."""
    known = [*metric.initial, tuple(f"odd|value %{rng.integers(5)}" for _ in metric.labels)]
    return series(metric.name, *known[rng.integers(len(known))])


def random_sample(rng: np.random.Generator, time_s: float) -> Sample:
    """Make what core publishes in one step: any subset of the declared metrics."""
    chosen = [(metric, random_series(rng, metric)) for metric in OWN if rng.random() < 0.5]
    return Sample(
        time_s=time_s,
        gauges={key: float(rng.integers(0, 50)) for m, key in chosen if m.type == "gauge"},
        counters={key: float(rng.integers(0, 500)) for m, key in chosen if m.type == "counter"},
        observations={
            key: rng.exponential(1, int(rng.integers(0, 4))).tolist()
            for m, key in chosen
            if m.type in ("histogram", "summary")
        },
        engine=int(rng.integers(2)),
        requests=[random_record(rng, time_s) for _ in range(rng.integers(3))],
    )


def random_record(rng: np.random.Generator, time_s: float) -> RequestRecord:
    """Make a request that ended at some stage: in the queue, in a row, or at its last token."""
    times = sorted((time_s - rng.exponential(1, 4)).tolist())
    times = times[: rng.integers(1, 5)]
    arrival_s, first_scheduled_s, first_token_s, last_token_s = [*times, 0.0, 0.0, 0.0][:4]
    n = int(rng.integers(1, 4))
    return RequestRecord(
        request_id=f"request-{rng.integers(1000)}",
        arrival_s=arrival_s,
        first_scheduled_s=first_scheduled_s,
        first_token_s=first_token_s,
        last_token_s=last_token_s,
        finished_s=time_s,
        num_prompt_tokens=int(rng.integers(1, 100)),
        num_cached_tokens=0,
        num_generated_tokens=int(rng.integers(0, 100)),
        finish_reasons=("stop",) * n,
        n=n,
        max_tokens=16,
        temperature=1.0,
        top_p=1.0,
        trace_headers={"traceparent": "nonsense"} if rng.random() < 0.5 else None,
    )


class MetricsContract:
    """Every metrics sink passes these. Override `sink`. The plugin's own tests must check what the
    sink does with the numbers."""

    def sink(self, setup: MetricsSetup) -> MetricsSink:
        """Return a new sink."""
        raise AssertionError("override MetricsContract.sink")

    @pytest.mark.parametrize("seed", range(5))
    def test_a_day_of_samples(self, seed: int) -> None:
        """declare, publish … and close never raise, for any subset of the metrics in a step, and do
        not modify the sample."""
        rng = np.random.default_rng(seed)
        sink = self.sink(SETUP)
        now = 1000.0
        sink.declare(OWN)
        for _ in range(100):
            now += float(rng.choice([0.0, 0.01, 0.9, 30.0]))
            sample = random_sample(rng, now)
            before = copy.deepcopy(sample)
            sink.publish(sample)
            assert sample == before
        sink.close()

    def test_a_sink_may_be_closed_before_anything_happened(self) -> None:
        sink = self.sink(SETUP)
        sink.declare(METRICS)
        sink.close()
        self.sink(SETUP).close()

    def test_an_empty_sample_and_a_metric_nobody_declared(self) -> None:
        """A plugin that was loaded later may publish a metric that was not declared to this sink.
        The sink ignores it."""
        sink = self.sink(SETUP)
        sink.declare(METRICS)
        sink.publish(Sample(1.0))
        sink.publish(
            Sample(2.0, {"unknown": 1.0}, {"unknown_total": 1.0}, {"unknown_seconds": [0.5]})
        )
        sink.close()

    def test_two_sinks_do_not_meet(self) -> None:
        """Two engines in one process each have their own sink."""
        first = self.sink(SETUP)
        second = self.sink(MetricsSetup("another"))
        for sink in (first, second):
            sink.declare(METRICS)
        for sink in (first, second, first):
            sink.publish(
                Sample(1.0, {"num_requests_running": 1.0}, {"generation_tokens_total": 5.0})
            )
        first.close()
        second.publish(Sample(2.0))
        second.close()

    def test_publishing_does_not_wait(self) -> None:
        """The engine's step calls the sink, so on average a sample may cost at most 1 ms of CPU
        time."""
        rng = np.random.default_rng(0)
        sink = self.sink(SETUP)
        sink.declare(OWN)
        samples = [random_sample(rng, index / 100) for index in range(300)]
        started = time.thread_time()
        for sample in samples:
            sink.publish(sample)
        assert time.thread_time() - started < 0.3
        sink.close()
