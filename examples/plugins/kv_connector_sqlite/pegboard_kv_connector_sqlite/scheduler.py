"""The scheduler half: which blocks the database has. It imports no torch."""

from __future__ import annotations

from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.named_store import NamedStore
from pegboard_kv.scheduler import StoreScheduler
from pegboard_kv_connector_sqlite.database import SqliteDatabase
from pegboard_kv_connector_sqlite.options import SqliteOptions


class SqliteScheduler(StoreScheduler):
    def __init__(self, options: SqliteOptions, setup: KVConnectorSetup) -> None:
        database = SqliteDatabase(options, setup)
        super().__init__(setup, NamedStore(database.has), load="between_steps")
