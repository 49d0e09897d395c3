"""Spec of the metrics sink `log`."""

from __future__ import annotations

from pegboard.interfaces.metrics import MetricsSpec

LOG = MetricsSpec(api="1.0", implementation="pegboard_metrics_log.sink:LogSink")
