"""Spec of the KV connector `offload`."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import STATES, KVConnectorSpec

OFFLOAD = KVConnectorSpec(
    api="1.0",
    implementation="pegboard_kv_connector_offload.scheduler:OffloadScheduler",
    worker="pegboard_kv_connector_offload.worker:OffloadWorker",
    flags=frozenset({STATES}),
    options="pegboard_kv_connector_offload.options:OffloadOptions",
)
