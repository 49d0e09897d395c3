"""The worker half: blocks are read with Mooncake."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.peers.worker import PeerWorker, check_key
from pegboard_kv_connector_mooncake.options import MooncakeOptions
from pegboard_kv_connector_mooncake.transport import MooncakeTransport


class MooncakeWorker(PeerWorker):
    """Serves, fetches and sends blocks with Mooncake."""

    def __init__(self, options: MooncakeOptions, setup: KVConnectorSetup) -> None:
        check_key(options)
        super().__init__(options, setup, MooncakeTransport(options))
