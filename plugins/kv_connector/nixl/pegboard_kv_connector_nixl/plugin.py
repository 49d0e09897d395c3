"""Spec of the KV connector `nixl`."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import STATES, KVConnectorSpec
from pegboard_kv.role import PEER_PARAMETERS

NIXL = KVConnectorSpec(
    api="1.0",
    implementation="pegboard_kv.peers.scheduler:PeerScheduler",
    worker="pegboard_kv_connector_nixl.worker:NixlWorker",
    parameters=PEER_PARAMETERS,
    flags=frozenset({STATES}),
    options="pegboard_kv_connector_nixl.options:NixlOptions",
    probe="pegboard_kv_connector_nixl.probe:probe",
)
