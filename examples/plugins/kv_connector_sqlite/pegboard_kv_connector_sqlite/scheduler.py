"""The scheduler half: which blocks the database has. It imports no torch."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.scheduler import StoreScheduler
from pegboard_kv_connector_sqlite.database import SqliteDatabase
from pegboard_kv_connector_sqlite.options import SqliteOptions


class SqliteStore:
    """The `pegboard_kv.scheduler.BlockStore` of the database. Blocks are found by name, so the
    number of a slot is always 0."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    def find(self, group: int, block_hash: bytes) -> int | None:
        return 0 if self._database.has(group, block_hash) else None

    def use(self, group: int, block_hash: bytes) -> int:
        return 0

    def reserve(self, group: int, block_hash: bytes) -> int | None:
        return None if self._database.has(group, block_hash) else 0

    def sent(self) -> None:
        """Keep nothing: a plan needs no room."""


class SqliteScheduler(StoreScheduler):
    def __init__(self, options: SqliteOptions, setup: KVConnectorSetup) -> None:
        super().__init__(setup, SqliteStore(SqliteDatabase(options, setup)), load="between_steps")
