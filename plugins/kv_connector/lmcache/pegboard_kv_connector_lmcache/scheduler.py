"""The scheduler half: asks LMCache's remote store for blocks."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.scheduler import StoreScheduler
from pegboard_kv_connector_lmcache.options import LMCacheOptions
from pegboard_kv_connector_lmcache.store import FINDER_GIB, LMCacheStore


class _Remote:
    """The `BlockStore` of LMCache. It asks each time, because other engines add and delete
    blocks."""

    def __init__(self, store: LMCacheStore) -> None:
        self._store = store

    def find(self, group: int, block_hash: bytes) -> int | None:
        return 0 if self._store.has(group, block_hash) else None

    def use(self, group: int, block_hash: bytes) -> int:
        return 0

    def reserve(self, group: int, block_hash: bytes) -> int | None:
        return None if self._store.has(group, block_hash) else 0

    def sent(self) -> None:
        """Nothing is kept for a plan."""


class LMCacheScheduler(StoreScheduler):
    """Loads between steps, because a store may take longer than a step may wait."""

    def __init__(self, options: LMCacheOptions, setup: KVConnectorSetup) -> None:
        super().__init__(
            setup,
            _Remote(LMCacheStore(options, setup, FINDER_GIB)),
            load="between_steps",
            role=options.role,
            wait_s=options.prefill_wait_s,
        )
