"""Spec of the KV connector `p2p`."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import STATES, KVConnectorSpec
from pegboard_kv.role import PEER_PARAMETERS

P2P = KVConnectorSpec(
    api="1.0",
    implementation="pegboard_kv.peers.scheduler:PeerScheduler",
    worker="pegboard_kv_connector_p2p.worker:P2PWorker",
    parameters=PEER_PARAMETERS,
    flags=frozenset({STATES}),
    options="pegboard_kv.peers.options:PeerOptions",
)
