"""The sink passes the contract of its kind and the generic contract."""

from __future__ import annotations

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pegboard_metrics_opentelemetry.options import OpenTelemetryOptions
from pegboard_metrics_opentelemetry.sink import OpenTelemetrySink

from pegboard.interfaces.metrics import MetricsSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_metrics import MetricsContract


def test_contract() -> None:
    check_entry(installed_entry("metrics", "opentelemetry"))


class TestOpenTelemetrySink(MetricsContract):
    def sink(self, setup: MetricsSetup) -> OpenTelemetrySink:
        return OpenTelemetrySink(
            OpenTelemetryOptions(endpoint="grpc://collector:4317"), setup, InMemorySpanExporter()
        )
