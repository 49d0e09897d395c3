"""What `LLM.get_metrics` returns: the sums of all samples, in vLLM's classes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from pegboard.data.output import Counter, Gauge, Histogram, MetricValue, Vector
from pegboard.interfaces.metrics import PREFIX, Metric, Reading, Totals


def metric_values(totals: Totals, model_name: str) -> list[MetricValue]:
    """All series. A counter with the label `position` is one Vector."""
    found: list[MetricValue] = []
    for metric, readings in totals.readings():
        if metric.labels == ("position",):
            found.extend(_vectors(metric, readings, model_name))
        else:
            found.extend(_value(reading, model_name) for reading in readings)
    return found


def _name(metric: Metric) -> str:
    name = metric.name.removesuffix("_total") if metric.type == "counter" else metric.name
    return (PREFIX if metric.prefixed else "") + name


def _labels(reading: Reading, model_name: str) -> dict[str, str]:
    common = {"model_name": model_name, "engine": str(reading.engine)}
    own = dict(zip(reading.metric.labels, reading.labels, strict=True))
    return {label: common[label] for label in reading.metric.common} | own


def _value(reading: Reading, model_name: str) -> MetricValue:
    metric = reading.metric
    name, labels = _name(metric), _labels(reading, model_name)
    if metric.type == "counter":
        return Counter(name, labels, int(reading.value) if reading.value.is_integer() else reading.value)  # type: ignore[arg-type]
    if metric.type == "gauge":
        return Gauge(name, labels, reading.value)
    edges = [*(str(edge) for edge in metric.buckets), "+Inf"]
    counts = dict(zip(edges, accumulate(reading.bucket_counts), strict=True)) if reading.bucket_counts else {}
    return Histogram(name, labels, reading.count, reading.value, counts)


def _vectors(metric: Metric, readings: list[Reading], model_name: str) -> Iterator[MetricValue]:
    for engine in sorted({reading.engine for reading in readings}):
        own = sorted((reading for reading in readings if reading.engine == engine), key=lambda reading: int(reading.labels[0]))
        labels = _labels(own[0], model_name)
        del labels["position"]
        yield Vector(_name(metric), labels, [int(reading.value) for reading in own])
