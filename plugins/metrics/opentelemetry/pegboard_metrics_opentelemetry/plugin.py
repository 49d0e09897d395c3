"""Spec of the metrics sink `opentelemetry`."""

from __future__ import annotations

from pegboard.interfaces.metrics import MetricsSpec

OPENTELEMETRY = MetricsSpec(
    api="1.0",
    implementation="pegboard_metrics_opentelemetry.sink:OpenTelemetrySink",
    options="pegboard_metrics_opentelemetry.options:OpenTelemetryOptions",
    flags=frozenset({"requests", "traces"}),
)
