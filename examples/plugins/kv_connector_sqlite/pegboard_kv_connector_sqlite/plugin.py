"""The spec of the KV connector `sqlite`. It imports nothing heavy."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import KVConnectorSpec

SQLITE = KVConnectorSpec(
    api="1.0",
    implementation="pegboard_kv_connector_sqlite.scheduler:SqliteScheduler",
    worker="pegboard_kv_connector_sqlite.worker:SqliteWorker",
    options="pegboard_kv_connector_sqlite.options:SqliteOptions",
)
