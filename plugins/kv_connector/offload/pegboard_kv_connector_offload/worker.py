"""The worker half: copies blocks between the KV memory and a memory of slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pegboard.data.batch import TransferReport
from pegboard.interfaces.attention import KVGroup, KVView
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.plan import TransferPlan, decode
from pegboard_kv.rows import BlockRows
from pegboard_kv_connector_offload.options import OffloadOptions


class OffloadWorker:
    """memory: uint8 [slots, bytes of a block] on the host. All groups share it, as they share the KV cache."""

    def __init__(self, options: OffloadOptions, setup: KVConnectorSetup) -> None:
        self._num_slots = options.num_slots(setup.plan)
        self._rows: list[BlockRows] = []
        self._plan = TransferPlan()

    def register(self, views: Mapping[int, KVView], groups: Sequence[KVGroup]) -> None:
        self._rows = [BlockRows(views, group.layers) for group in groups]
        self._memory = torch.empty(self._num_slots, max(rows.num_bytes for rows in self._rows), dtype=torch.uint8)

    def save(self, plan: bytes) -> None:
        self._plan = decode(plan)
        for group, rows in enumerate(self._rows):
            places = [place for place in self._plan.saves if place.group == group]
            if places:
                slots = torch.tensor([place.slot for place in places])
                self._memory[slots, : rows.num_bytes] = rows.read([place.block_id for place in places])

    def begin(self, plan: bytes) -> None:
        for wanted in self._plan.loads.values():
            for group, rows in enumerate(self._rows):
                places = [place for place in wanted if place.group == group]
                if places:
                    slots = torch.tensor([place.slot for place in places])
                    rows.write([place.block_id for place in places], self._memory[slots, : rows.num_bytes])

    def end(self) -> TransferReport:
        return TransferReport(saved=self._plan.released, loaded=list(self._plan.loads), failed={})

    def close(self) -> None:
        """The memory goes with the object."""
