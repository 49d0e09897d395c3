"""Names of series, sums of samples, and the relay of samples between processes."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.engine.boundary.messages import Measured, decode_from_engine, encode
from pegboard.engine.metrics.sinks import RELAY_INTERVAL_S, SampleRelay, Sinks, merged
from pegboard.interfaces.metrics import Metric, Sample, Totals, series, split_series
from pegboard_testing.contract_metrics import OWN, random_sample

names = st.text("abc_:", min_size=1)
samples = st.integers(0, 2**32 - 1).map(
    lambda seed: random_sample(np.random.default_rng(seed), 1.0)
)


@given(names, st.lists(st.text(), max_size=3))
def test_a_series_can_be_taken_apart(name: str, values: list[str]) -> None:
    assert split_series(series(name, *values)) == (name, tuple(values))


def state(totals: Totals) -> dict[tuple[str, int, tuple[str, ...]], tuple[float, int, list[int]]]:
    """Return every series whose value has changed since the start."""
    return {
        (metric.name, reading.engine, reading.labels): (
            round(reading.value, 6),
            reading.count,
            reading.bucket_counts,
        )
        for metric, readings in totals.readings()
        for reading in readings
        if reading.value or reading.count
    }


def summed(all_samples: list[Sample]) -> Totals:
    totals = Totals()
    totals.declare(OWN)
    for sample in all_samples:
        totals.publish(sample)
    return totals


def of_engine(sample: Sample, engine: int) -> Sample:
    sample.engine = engine
    return sample


@given(st.lists(samples, min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_merged_samples_add_up_to_the_same(parts: list[Sample]) -> None:
    parts = [of_engine(part, 0) for part in parts]
    whole = parts[0]
    for part in parts[1:]:
        whole = merged(whole, part)
    latest = {metric.name for metric in OWN if metric.latest}
    one = state(summed([whole]))
    many = state(summed(parts))
    assert {k: v for k, v in one.items() if k[0] not in latest} == {
        k: v for k, v in many.items() if k[0] not in latest
    }
    assert list(whole.requests) == [record for part in parts for record in part.requests]


@given(st.lists(st.lists(st.floats(-1, 20), max_size=10), max_size=5))
def test_buckets_count_what_is_at_most_their_edge(parts: list[list[float]]) -> None:
    totals = Totals()
    totals.declare([Metric("seconds", "histogram", "", (1.0, 5.0, 10.0))])
    for part in parts:
        totals.publish(Sample(0.0, observations={"seconds": part}))
    ((_, (reading,)),) = totals.readings()
    values = [value for part in parts for value in part]
    edges = (-np.inf, 1.0, 5.0, 10.0, np.inf)
    counts = [
        sum(low < value <= high for value in values)
        for low, high in zip(edges, edges[1:], strict=False)
    ]
    assert (
        reading.bucket_counts == counts
        and reading.count == len(values)
        and reading.value == pytest.approx(sum(values))
    )


def test_what_exists_before_anything_is_measured() -> None:
    metrics = [
        Metric("steps_total", "counter", ""),
        Metric("ended_total", "counter", "", labels=("reason",), initial=(("stop",), ("length",))),
        Metric("adapters", "gauge", "", labels=("names",), latest=True),
        Metric("http_total", "counter", "", common=()),
    ]
    totals = Totals()
    totals.declare(metrics)

    def series_of() -> list[tuple[str, int, tuple[str, ...]]]:
        return [
            (metric.name, reading.engine, reading.labels)
            for metric, found in totals.readings()
            for reading in found
        ]

    assert series_of() == [
        ("steps_total", 0, ()),
        ("ended_total", 0, ("stop",)),
        ("ended_total", 0, ("length",)),
        ("http_total", 0, ()),
    ]
    totals.publish(Sample(0.0, {series("adapters", "a"): 1.0}))
    totals.publish(Sample(0.0, {series("adapters", "a,b"): 2.0}))
    totals.publish(Sample(0.0, engine=1))
    assert ("adapters", 0, ("a,b",)) in series_of() and ("adapters", 0, ("a",)) not in series_of()
    assert ("ended_total", 1, ("stop",)) in series_of() and ("http_total", 1, ()) not in series_of()


def test_the_first_engine_may_have_another_number() -> None:
    totals = Totals(2)
    totals.declare([Metric("steps_total", "counter", ""), Metric("http", "gauge", "", common=())])
    totals.publish(Sample(0.0, counters={"steps_total": 1.0}, engine=3))
    found = [(metric.name, each.engine) for metric, all in totals.readings() for each in all]
    assert found == [("steps_total", 2), ("steps_total", 3), ("http", 2)]


@given(samples)
@settings(max_examples=30, deadline=None)
def test_a_sample_survives_the_journey(sample: Sample) -> None:
    arrived = decode_from_engine(encode(Measured(sample)))
    assert isinstance(arrived, Measured)
    arrived.sample.requests = list(arrived.sample.requests)
    arrived.sample.kv_events = tuple(arrived.sample.kv_events)
    assert arrived.sample == sample


def busy(time_s: float, **observations: list[float]) -> Sample:
    return Sample(
        time_s, {"num_requests_running": 1.0}, {"generation_tokens_total": 1}, observations
    )


def test_the_relay_sends_seldom_but_never_keeps_news_from_who_has_the_answer() -> None:
    relay = SampleRelay()
    relay.publish(busy(100.0))
    assert relay.take() is not None and relay.take() is None
    for step in range(5):
        relay.publish(busy(100.0 + RELAY_INTERVAL_S * step / 10))
        assert relay.take() is None
    relay.publish(busy(100.0 + RELAY_INTERVAL_S * 2))
    sample = relay.take()
    assert sample is not None and sample.counters == {"generation_tokens_total": 6}
    relay.publish(busy(100.0 + RELAY_INTERVAL_S * 2.5, e2e_request_latency_seconds=[1.0]))
    assert relay.take() is not None, "a completion has ended"
    relay.publish(
        Sample(
            100.0 + RELAY_INTERVAL_S * 2.5,
            {"num_requests_running": 0.0, "num_requests_waiting": 0.0},
        )
    )
    assert relay.take() is not None, "the engine goes idle, so there may be no next step"


class Sink:
    def __init__(self, fails_in: str = "") -> None:
        self.calls: list[str] = []
        self._fails_in = fails_in

    def __getattr__(self, name: str) -> Any:
        def call(*args: object) -> None:
            self.calls.append(name)
            if name == self._fails_in:
                raise OSError("disk full")

        return call


@pytest.mark.parametrize("method", ["declare", "publish", "close"])
def test_a_failing_sink_does_no_harm(method: str, caplog: pytest.LogCaptureFixture) -> None:
    bad = Sink(method)
    good = Sink()
    sinks = Sinks([bad, good])  # type: ignore[list-item]
    with caplog.at_level(logging.WARNING, "pegboard"):
        sinks.declare([])
        sinks.publish(Sample(0.0))
        sinks.publish(Sample(1.0))
        sinks.close()
    assert good.calls == ["declare", "publish", "publish", "close"]
    assert bad.calls == good.calls[: good.calls.index(method) + 1]
    assert len(caplog.records) == 1
