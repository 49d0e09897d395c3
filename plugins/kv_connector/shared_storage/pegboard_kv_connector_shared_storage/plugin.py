"""Spec of the KV connector `shared_storage`."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import STATES, KVConnectorSpec
from pegboard_kv.role import PARAMETERS

SHARED_STORAGE = KVConnectorSpec(
    api="1.0",
    implementation="pegboard_kv_connector_shared_storage.scheduler:SharedStorageScheduler",
    worker="pegboard_kv_connector_shared_storage.worker:SharedStorageWorker",
    parameters=PARAMETERS,
    flags=frozenset({STATES}),
    options="pegboard_kv_connector_shared_storage.options:SharedStorageOptions",
)
