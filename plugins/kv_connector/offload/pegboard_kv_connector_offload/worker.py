"""The worker half: copies blocks between the KV memory and a memory of slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pegboard.data.batch import TransferReport
from pegboard.interfaces.attention import KVGroup, KVView
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.plan import TransferPlan, decode
from pegboard_kv.rows import BlockRows, as_words
from pegboard_kv_connector_offload.options import OffloadOptions


class OffloadWorker:
    """The slots are one memory on the host, [slots, bytes of a block]. All groups share it, as they
    share the KV cache."""

    def __init__(self, options: OffloadOptions, setup: KVConnectorSetup) -> None:
        self._num_slots = options.num_slots(setup.plan)
        self._rows: list[BlockRows] = []
        self._plan = TransferPlan()

    def register(self, views: Mapping[int, KVView], groups: Sequence[KVGroup]) -> None:
        self._rows = [BlockRows(views, group.layers) for group in groups]
        longest = max(rows.num_bytes for rows in self._rows)
        memory = torch.empty(self._num_slots, -(-longest // 8) * 8, dtype=torch.uint8)
        self._memory = [memory[:, : rows.num_bytes] for rows in self._rows]

    def save(self, plan: bytes) -> None:
        self._plan = decode(plan)
        for group, rows in enumerate(self._rows):
            places = [place for place in self._plan.saves if place.group == group]
            if places and rows.num_bytes:
                slots = torch.tensor([place.slot for place in places])
                copies = rows.read([place.block_id for place in places])
                as_words(self._memory[group]).index_copy_(0, slots, as_words(copies))

    def begin(self, plan: bytes) -> None:
        for wanted in self._plan.loads.values():
            for group, rows in enumerate(self._rows):
                places = [place for place in wanted if place.group == group]
                if places and rows.num_bytes:
                    slots = torch.tensor([place.slot for place in places])
                    copies = as_words(self._memory[group]).index_select(0, slots).view(torch.uint8)
                    rows.write([place.block_id for place in places], copies)

    def end(self) -> TransferReport:
        return TransferReport(saved=self._plan.released, loaded=list(self._plan.loads), failed={})

    def close(self) -> None:
        """The memory goes with the object."""
