"""The spec of the metrics sink `jsonl`."""

from __future__ import annotations

from pegboard.interfaces.metrics import MetricsSpec

JSONL = MetricsSpec(
    api="1.0",
    implementation="pegboard_metrics_jsonl.sink:JsonlSink",
    options="pegboard_metrics_jsonl.options:JsonlOptions",
)
