"""Spec of the KV connector `mooncake`."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import STATES, KVConnectorSpec
from pegboard_kv.role import PEER_PARAMETERS

MOONCAKE = KVConnectorSpec(
    api="1.0",
    implementation="pegboard_kv.peers.scheduler:PeerScheduler",
    worker="pegboard_kv_connector_mooncake.worker:MooncakeWorker",
    parameters=PEER_PARAMETERS,
    flags=frozenset({STATES}),
    options="pegboard_kv_connector_mooncake.options:MooncakeOptions",
    probe="pegboard_kv_connector_mooncake.probe:probe",
)
