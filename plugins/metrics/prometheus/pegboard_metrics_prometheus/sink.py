"""The metrics sink `prometheus`. It adds up all samples in its own registry. Publishing only adds
numbers; the text is made on request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pegboard.interfaces.metrics import Metric, MetricsSetup, Reading, Sample, Totals
from pegboard_metrics_prometheus.options import PrometheusOptions


class PrometheusSink:
    """registry: the source for the exposition."""

    def __init__(self, options: PrometheusOptions, setup: MetricsSetup) -> None:
        self.registry = CollectorRegistry()
        self._totals = Totals(setup.engine)
        if options.process_metrics:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)
            GCCollector(registry=self.registry)
        self.registry.register(_Families(self._totals, options.prefix, setup.model_name))

    def declare(self, metrics: Sequence[Metric]) -> None:
        self._totals.declare(metrics)

    def publish(self, sample: Sample) -> None:
        self._totals.publish(sample)

    def close(self) -> None:
        self._totals.close()


class _Families(Collector):
    """Yields the totals in Prometheus' form. They are built for every scrape."""

    def __init__(self, totals: Totals, prefix: str, model_name: str) -> None:
        self._totals = totals
        self._prefix = prefix
        self._model_name = model_name

    def collect(self) -> Iterator[Family]:
        for metric, readings in self._totals.readings():
            name = (self._prefix if metric.prefixed else "") + metric.name
            if metric.type == "counter":
                name = name.removesuffix("_total")
            family = Family(name, metric.help, metric.type)
            for reading in readings:
                self._add(family, reading)
            yield family

    def describe(self) -> list[Family]:
        """Returns nothing, because registering must not read metrics that are declared later."""
        return []

    def _add(self, family: Family, reading: Reading) -> None:
        metric = reading.metric
        name = family.name
        common = {"model_name": self._model_name, "engine": str(reading.engine)}
        labels = {label: common[label] for label in metric.common} | dict(
            zip(metric.labels, reading.labels, strict=True)
        )
        if metric.type == "gauge":
            family.add_sample(name, labels, reading.value)
        elif metric.type == "counter":
            family.add_sample(f"{name}_total", labels, reading.value)
        else:
            edges = (
                [*map(floatToGoString, metric.buckets), "+Inf"]
                if metric.type == "histogram"
                else []
            )
            for edge, count in zip(edges, accumulate(reading.bucket_counts), strict=True):
                family.add_sample(f"{name}_bucket", {**labels, "le": edge}, count)
            family.add_sample(f"{name}_count", labels, reading.count)
            family.add_sample(f"{name}_sum", labels, reading.value)
