"""The worker half: copies blocks between the KV memory and the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pegboard.data.batch import TransferReport
from pegboard.interfaces.attention import KVGroup, KVView
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.plan import Place, TransferPlan, decode
from pegboard_kv.rows import BlockRows
from pegboard_kv_connector_sqlite.database import SqliteDatabase
from pegboard_kv_connector_sqlite.options import SqliteOptions


class SqliteWorker:
    """Reads and writes within the step. That is simple; threads would let the model compute
    meanwhile."""

    def __init__(self, options: SqliteOptions, setup: KVConnectorSetup) -> None:
        self._database = SqliteDatabase(options, setup)
        self._rows: list[BlockRows] = []
        self._plan = TransferPlan()
        self._missing: dict[str, int] = {}

    def register(self, views: Mapping[int, KVView], groups: Sequence[KVGroup]) -> None:
        self._rows = [BlockRows(views, group.layers) for group in groups]

    def save(self, plan: bytes) -> None:
        self._plan = decode(plan)
        blocks = []
        for group, rows in enumerate(self._rows):
            places = [place for place in self._plan.saves if place.group == group]
            if places:
                copies = rows.read([place.block_id for place in places]).numpy()
                blocks += [
                    (group, place.block_hash, row.tobytes())
                    for place, row in zip(places, copies, strict=True)
                ]
        if blocks:
            self._database.write(blocks)

    def begin(self, plan: bytes) -> None:
        for key, places in self._plan.loads.items():
            missing = [place.first_token for place in places if not self._load(place)]
            if missing:
                self._missing[key] = min(missing)

    def _load(self, place: Place) -> bool:
        """Copy one block into the KV memory. Return False if it is gone or has another size: then
        its tokens are computed."""
        rows = self._rows[place.group]
        content = self._database.read(place.group, place.block_hash)
        if content is None or len(content) != rows.num_bytes:
            return False
        rows.write(
            [place.block_id], torch.frombuffer(bytearray(content), dtype=torch.uint8).unsqueeze(0)
        )
        return True

    def end(self) -> TransferReport:
        failed = self._missing
        self._missing = {}
        loaded = [key for key in self._plan.loads if key not in failed]
        return TransferReport(saved=self._plan.released, loaded=loaded, failed=failed)

    def close(self) -> None:
        self._database.close()
