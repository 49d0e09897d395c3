"""An engine with the connector in a process of its own."""

from __future__ import annotations

from typing import Any

from pegboard_kv_connector_mooncake.options import MooncakeOptions
from pegboard_kv_connector_mooncake.worker import MooncakeWorker

from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_testing.contract_peers import serve


def worker(setup: KVConnectorSetup, **options: Any) -> MooncakeWorker:
    return MooncakeWorker(MooncakeOptions(**options), setup)


if __name__ == "__main__":
    serve(worker)
