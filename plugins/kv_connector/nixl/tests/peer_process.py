"""An engine with the connector in a process of its own: it computes the prompt, writes its
parameters to standard output, and serves until standard input ends."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from pegboard_kv_connector_nixl.options import NixlOptions
from pegboard_kv_connector_nixl.worker import NixlWorker

from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_testing.contract_peers import ASK, Peer


def worker(setup: KVConnectorSetup, **options: Any) -> NixlWorker:
    return NixlWorker(NixlOptions(**options), setup)


if __name__ == "__main__":
    answer = Peer(worker).run(ASK)
    print(f"answer {msgspec.json.encode(answer).decode()}", flush=True)
    sys.stdin.read()
