"""Spec of the metrics sink `zmq`."""

from __future__ import annotations

from pegboard.interfaces.metrics import MetricsSpec

ZMQ = MetricsSpec(
    api="1.0",
    implementation="pegboard_metrics_zmq.sink:ZmqSink",
    options="pegboard_metrics_zmq.options:ZmqOptions",
    flags=frozenset({"kv_events"}),
)
