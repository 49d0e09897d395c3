"""The worker half: blocks go to LMCache and come from it."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.plan import Place
from pegboard_kv.store_worker import StoreWorker
from pegboard_kv_connector_lmcache.options import LMCacheOptions
from pegboard_kv_connector_lmcache.store import LMCacheStore


class LMCacheWorker(StoreWorker):
    """Hands blocks to LMCache, in the threads of `StoreWorker`."""

    def __init__(self, options: LMCacheOptions, setup: KVConnectorSetup) -> None:
        super().__init__(setup)
        self._store = LMCacheStore(options, setup, options.max_local_cpu_size)

    def write(self, place: Place, content: memoryview) -> None:
        self._store.write(place.group, place.block_hash, content)

    def read(self, place: Place, content: memoryview) -> bool:
        return self._store.read(place.group, place.block_hash, content)

    def close(self) -> None:
        super().close()
        self._store.close()
