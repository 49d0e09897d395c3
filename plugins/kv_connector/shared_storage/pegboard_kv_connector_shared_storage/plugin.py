"""Spec of the KV connector `shared_storage`."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import KVConnectorSpec
from pegboard_kv.role import PARAMETERS

SHARED_STORAGE = KVConnectorSpec(
    api="1.0",
    implementation="pegboard_kv_connector_shared_storage.scheduler:SharedStorageScheduler",
    worker="pegboard_kv_connector_shared_storage.worker:SharedStorageWorker",
    parameters=PARAMETERS,
    options="pegboard_kv_connector_shared_storage.options:SharedStorageOptions",
)
