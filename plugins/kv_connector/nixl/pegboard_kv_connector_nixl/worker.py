"""The worker half: blocks are read with NIXL."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.peers.worker import PeerWorker, check_key
from pegboard_kv_connector_nixl.options import NixlOptions
from pegboard_kv_connector_nixl.transport import NixlTransport


class NixlWorker(PeerWorker):
    """Serves, fetches and sends blocks with NIXL."""

    def __init__(self, options: NixlOptions, setup: KVConnectorSetup) -> None:
        check_key(options)
        super().__init__(options, setup, NixlTransport(options.num_bytes, options.backends))
