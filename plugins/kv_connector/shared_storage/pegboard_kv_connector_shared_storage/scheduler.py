"""The scheduler half: finds blocks by the names of their files. It imports no torch."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.scheduler import StoreScheduler
from pegboard_kv_connector_shared_storage.folder import BlockFolder
from pegboard_kv_connector_shared_storage.neighbours import introduce
from pegboard_kv_connector_shared_storage.options import SharedStorageOptions


class _Files:
    """The `BlockStore` of a folder. It asks the file system each time, because other engines add
    and delete blocks."""

    def __init__(self, folder: BlockFolder) -> None:
        self._folder = folder

    def find(self, group: int, block_hash: bytes) -> int | None:
        return 0 if self._folder.has(group, block_hash) else None

    def use(self, group: int, block_hash: bytes) -> int:
        return 0

    def reserve(self, group: int, block_hash: bytes) -> int | None:
        return None if self._folder.has(group, block_hash) else 0

    def sent(self) -> None:
        """Nothing is kept for a plan."""


class SharedStorageScheduler(StoreScheduler):
    """Loads between steps, because reading files takes longer than a step may wait."""

    def __init__(self, options: SharedStorageOptions, setup: KVConnectorSetup) -> None:
        folder = BlockFolder.open(options, setup)
        introduce(folder, options, setup)
        super().__init__(
            setup,
            _Files(folder),
            load="between_steps",
            role=options.role,
            wait_s=options.prefill_wait_s,
        )
