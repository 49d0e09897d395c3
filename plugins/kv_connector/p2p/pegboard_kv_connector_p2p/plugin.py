"""Spec of the KV connector `p2p`."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import KVConnectorSpec
from pegboard_kv.role import PARAMETERS

REMOTE = frozenset({"remote_host", "remote_port", "remote_num_tokens", "remote_first_hash"})
"""The names in `kv_transfer_params` that say where the blocks of a prompt are, of how many tokens,
and what the first one is called."""

P2P = KVConnectorSpec(
    api="1.0",
    implementation="pegboard_kv_connector_p2p.scheduler:P2PScheduler",
    worker="pegboard_kv_connector_p2p.worker:P2PWorker",
    parameters=PARAMETERS | REMOTE,
    options="pegboard_kv_connector_p2p.options:P2POptions",
)
