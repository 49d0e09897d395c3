"""The contract of the kind, damage, and the limit."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from pegboard_kv_connector_sqlite.options import SqliteOptions
from pegboard_kv_connector_sqlite.scheduler import SqliteScheduler
from pegboard_kv_connector_sqlite.worker import SqliteWorker

from pegboard.errors import ConfigError
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_kv_connector import Halves, greedy
from pegboard_testing.contract_kv_states import MovesStates


def test_contract() -> None:
    check_entry(installed_entry("kv_connector", "sqlite"))


class TestSqlite(MovesStates):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "blocks.sqlite"
        self.max_blocks = 1000

    def halves(self, setup: KVConnectorSetup) -> Halves:
        options = SqliteOptions(path=self.path, max_blocks=self.max_blocks)
        return SqliteScheduler(options, setup), SqliteWorker(options, setup)

    @pytest.mark.parametrize("content", [b"", b"short", b"x" * 100_000])
    def test_damaged_blocks_are_computed_again(self, content: bytes) -> None:
        first = self.engine()
        expected = first.generate(range(21), greedy(6)).token_ids
        self.close(first)
        with sqlite3.connect(self.path) as database:
            database.execute("UPDATE blocks SET content = ?", (content,))
        second = self.engine()
        assert second.generate(range(21), greedy(6)).token_ids == expected
        self.close(second)

    def test_the_oldest_blocks_are_deleted(self) -> None:
        first = self.engine()
        outputs = {
            start: first.generate(range(start, start + 21), greedy(2)).token_ids
            for start in (0, 14, 28)
        }
        self.close(first)
        with sqlite3.connect(self.path) as database:
            before = [
                number
                for (number,) in database.execute("SELECT number FROM blocks ORDER BY number")
            ]
        self.max_blocks = 3
        second = self.engine()
        assert second.generate(range(28, 49), greedy(2)).token_ids == outputs[28], (
            "the newest are still there"
        )
        assert second.generate(range(42, 63), greedy(2)).token_ids
        assert second.generate(range(21), greedy(2)).token_ids == outputs[0], (
            "what was deleted is computed again"
        )
        self.close(second)
        with sqlite3.connect(self.path) as database:
            kept = [
                number
                for (number,) in database.execute("SELECT number FROM blocks ORDER BY number")
            ]
        assert len(before) > 6 and len(kept) <= 3 and kept[0] > before[-1]

    def test_a_file_that_is_not_a_database_is_explained(self) -> None:
        self.path.write_bytes(b"this is text, not a database" * 100)
        with pytest.raises(ConfigError, match=r"blocks\.sqlite cannot be opened"):
            self.engine()
