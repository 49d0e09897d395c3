"""Spec of the KV connector `lmcache`."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import STATES, KVConnectorSpec
from pegboard_kv.role import PARAMETERS

LMCACHE = KVConnectorSpec(
    api="1.0",
    implementation="pegboard_kv_connector_lmcache.scheduler:LMCacheScheduler",
    worker="pegboard_kv_connector_lmcache.worker:LMCacheWorker",
    parameters=PARAMETERS,
    flags=frozenset({STATES}),
    options="pegboard_kv_connector_lmcache.options:LMCacheOptions",
    probe="pegboard_kv_connector_lmcache.probe:probe",
)
