"""The scheduler half: asks LMCache's remote store for blocks."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.named_store import NamedStore
from pegboard_kv.scheduler import StoreScheduler
from pegboard_kv_connector_lmcache.options import LMCacheOptions
from pegboard_kv_connector_lmcache.store import FINDER_GIB, LMCacheStore


class LMCacheScheduler(StoreScheduler):
    """Loads between steps, because a store may take longer than a step may wait."""

    def __init__(self, options: LMCacheOptions, setup: KVConnectorSetup) -> None:
        super().__init__(
            setup,
            NamedStore(LMCacheStore(options, setup, FINDER_GIB).has),
            load="between_steps",
            role=options.role,
            wait_s=options.prefill_wait_s,
        )
