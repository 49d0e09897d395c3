"""Specs of the metrics sink and of the api `prometheus`. Both run in the API process, and the api
reads the sink."""

from __future__ import annotations

from pegboard.interfaces.api import ApiSpec
from pegboard.interfaces.metrics import MetricsSpec

SINK = MetricsSpec(
    api="1.0",
    implementation="pegboard_metrics_prometheus.sink:PrometheusSink",
    options="pegboard_metrics_prometheus.options:PrometheusOptions",
    process="api",
)
API = ApiSpec(
    api="1.0",
    implementation="pegboard_metrics_prometheus.api:PrometheusApi",
    unmeasured_paths=("/metrics",),
)
