"""The spec of the KV connector `sqlite`. It imports nothing heavy."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import STATES, KVConnectorSpec

SQLITE = KVConnectorSpec(
    api="1.0",
    implementation="pegboard_kv_connector_sqlite.scheduler:SqliteScheduler",
    worker="pegboard_kv_connector_sqlite.worker:SqliteWorker",
    flags=frozenset({STATES}),
    options="pegboard_kv_connector_sqlite.options:SqliteOptions",
)
