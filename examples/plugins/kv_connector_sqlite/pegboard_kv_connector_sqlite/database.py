"""The database. A block has the name (identity of the model, rank, KV group, hash). Both halves
open it. It imports no torch."""

from __future__ import annotations

import sqlite3

from pegboard.errors import ConfigError
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv_connector_sqlite.options import SqliteOptions

TABLE = """CREATE TABLE IF NOT EXISTS blocks (
    number INTEGER PRIMARY KEY, identity TEXT, rank INTEGER, kv_group INTEGER, hash BLOB, content BLOB,
    UNIQUE (identity, rank, kv_group, hash)
)"""  # noqa: E501
WRITE = "REPLACE INTO blocks (identity, rank, kv_group, hash, content) VALUES (?, ?, ?, ?, ?)"
LIMIT = "DELETE FROM blocks WHERE number <= (SELECT max(number) FROM blocks) - ?"
WHERE = "FROM blocks WHERE identity = ? AND rank = ? AND kv_group = ? AND hash = ?"


class SqliteDatabase:
    def __init__(self, options: SqliteOptions, setup: KVConnectorSetup) -> None:
        self._owner = (setup.plan.identity, setup.rank)
        self._max_blocks = options.max_blocks
        try:
            self._database = sqlite3.connect(
                options.path.expanduser(), isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode = WAL")  # readers do not wait for a writer
            # after a loss of power some blocks are computed again
            self._database.execute("PRAGMA synchronous = OFF")
            self._database.execute(TABLE)
        except sqlite3.Error as error:
            raise ConfigError(
                f"the database of KV blocks {options.path} cannot be opened: {error}"
            ) from error

    def has(self, group: int, block_hash: bytes) -> bool:
        return (
            self._database.execute(
                f"SELECT 1 {WHERE}", (*self._owner, group, block_hash)
            ).fetchone()
            is not None
        )

    def read(self, group: int, block_hash: bytes) -> bytes | None:
        row = self._database.execute(
            f"SELECT content {WHERE}", (*self._owner, group, block_hash)
        ).fetchone()
        return None if row is None else bytes(row[0])

    def write(self, blocks: list[tuple[int, bytes, bytes]]) -> None:
        """Store blocks (group, hash, content) in one transaction. Each gets the next number; those
        with the lowest numbers are deleted."""
        self._database.execute("BEGIN")
        self._database.executemany(WRITE, [(*self._owner, *block) for block in blocks])
        self._database.execute(LIMIT, (self._max_blocks,))
        self._database.execute("COMMIT")

    def close(self) -> None:
        self._database.close()
