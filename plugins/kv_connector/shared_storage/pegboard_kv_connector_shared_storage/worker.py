"""The worker half: blocks are files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pegboard.interfaces.attention import KVGroup, KVView
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard.log import get_logger
from pegboard_kv.plan import Place
from pegboard_kv.store_worker import StoreWorker
from pegboard_kv_connector_shared_storage.block_file import BlockHeader
from pegboard_kv_connector_shared_storage.folder import BlockFolder
from pegboard_kv_connector_shared_storage.options import SharedStorageOptions

log = get_logger(__name__)

HASH_BYTES = 32


class SharedStorageWorker(StoreWorker):
    """Reads and writes files, in the threads of `StoreWorker`."""

    def __init__(self, options: SharedStorageOptions, setup: KVConnectorSetup) -> None:
        super().__init__(setup)
        self._folder = BlockFolder.open(options, setup)

    def register(self, views: Mapping[int, KVView], groups: Sequence[KVGroup]) -> None:
        super().register(views, groups)
        identity = self.setup.plan.identity
        self._headers = [
            BlockHeader(identity, self.setup.rank, group, rows.parts, HASH_BYTES)
            for group, rows in enumerate(self.rows)
        ]

    def write(self, place: Place, content: memoryview) -> None:
        header = self._headers[place.group].encode(place.block_hash, content)
        self._folder.write(place.group, place.block_hash, [header, content])

    def read(self, place: Place, content: memoryview) -> bool:
        expected = self._headers[place.group]
        header = bytearray(expected.num_bytes)
        try:
            self._folder.read(place.group, place.block_hash, [header, content])
            if header != expected.encode(place.block_hash, content):
                raise ValueError("its header or its checksum is not the expected one")
        except FileNotFoundError:
            return False  # another process has deleted it
        except (OSError, ValueError) as error:
            path = self._folder.path(place.group, place.block_hash)
            log.warning(
                "the stored KV block %s is refused: %s; its tokens are computed", path, error
            )
            self._folder.remove(place.group, place.block_hash)
            return False
        return True
