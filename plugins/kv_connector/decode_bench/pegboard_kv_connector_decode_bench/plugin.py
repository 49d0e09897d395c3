"""Spec of the KV connector `decode_bench`."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import KVConnectorSpec

DECODE_BENCH = KVConnectorSpec(
    api="1.0",
    implementation="pegboard_kv_connector_decode_bench.scheduler:DecodeBenchScheduler",
    worker="pegboard_kv_connector_decode_bench.worker:DecodeBenchWorker",
    options="pegboard_kv_connector_decode_bench.options:DecodeBenchOptions",
    alone="its blocks are made up, and others would save them as real ones",
)
