"""The scheduler half: finds blocks by the names of their files. It imports no torch."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.named_store import NamedStore
from pegboard_kv.scheduler import StoreScheduler
from pegboard_kv_connector_shared_storage.folder import BlockFolder
from pegboard_kv_connector_shared_storage.neighbours import introduce
from pegboard_kv_connector_shared_storage.options import SharedStorageOptions


class SharedStorageScheduler(StoreScheduler):
    """Loads between steps, because reading files takes longer than a step may wait."""

    def __init__(self, options: SharedStorageOptions, setup: KVConnectorSetup) -> None:
        folder = BlockFolder.open(options, setup)
        introduce(folder, options, setup)
        super().__init__(
            setup,
            NamedStore(folder.has),
            load="between_steps",
            role=options.role,
            wait_s=options.prefill_wait_s,
        )
