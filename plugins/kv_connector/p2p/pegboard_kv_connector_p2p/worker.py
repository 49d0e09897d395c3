"""The worker half: blocks go through the connections themselves."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.peers.options import PeerOptions
from pegboard_kv.peers.transport import Stream
from pegboard_kv.peers.worker import PeerWorker


class P2PWorker(PeerWorker):
    """Serves, fetches and sends blocks over TCP."""

    def __init__(self, options: PeerOptions, setup: KVConnectorSetup) -> None:
        super().__init__(options, setup, Stream())
