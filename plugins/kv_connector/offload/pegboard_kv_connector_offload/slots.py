"""The memory of slots: for a KV memory of the host, and for that of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pegboard.interfaces.attention import KVGroup, KVView
from pegboard.interfaces.platform import Copies, SideCopies
from pegboard_kv.plan import Place
from pegboard_kv.rows import BlockRows, as_words

PIECE_BYTES = 2**30
"""The largest piece of pinned memory. torch rounds the bytes of each piece up to a power of two."""


class Slots(Protocol):
    """Blocks of one KV group and their slots."""

    def save(self, group: int, places: Sequence[Place]) -> None:
        """Copy blocks to their slots."""

    def load(self, group: int, places: Sequence[Place]) -> None:
        """Copy slots to their blocks."""


class HostSlots:
    """Copies at once. The slots are one memory, [slots, bytes of a block]. All groups share it, as
    they share the KV cache."""

    def __init__(
        self, num_slots: int, views: Mapping[int, KVView], groups: Sequence[KVGroup]
    ) -> None:
        self._rows = [BlockRows(views, group.layers) for group in groups]
        longest = max(rows.num_bytes for rows in self._rows)
        memory = torch.empty(num_slots, -(-longest // 8) * 8, dtype=torch.uint8)
        self._memory = [as_words(memory[:, : rows.num_bytes]) for rows in self._rows]

    def save(self, group: int, places: Sequence[Place]) -> None:
        rows = self._rows[group]
        if rows.num_bytes:
            slots = torch.tensor([place.slot for place in places])
            copies = rows.read([place.block_id for place in places])
            self._memory[group].index_copy_(0, slots, as_words(copies))

    def load(self, group: int, places: Sequence[Place]) -> None:
        rows = self._rows[group]
        if rows.num_bytes:
            slots = torch.tensor([place.slot for place in places])
            copies = self._memory[group].index_select(0, slots).view(torch.uint8)
            rows.write([place.block_id for place in places], copies)


class SideSlots:
    """Copies beside the computation of a device. A step copies the blocks that it saves on the
    device, and goes on while these copies go to the host. The slots are pinned memory, in
    pieces."""

    def __init__(
        self,
        num_slots: int,
        views: Mapping[int, KVView],
        groups: Sequence[KVGroup],
        copies: Copies,
        side: SideCopies,
    ) -> None:
        self._rows = [BlockRows(views, group.layers) for group in groups]
        self._copies = copies
        self._side = side
        longest = max(max(rows.num_bytes for rows in self._rows), 1)
        self._num_together = max(PIECE_BYTES // longest, 1)
        starts = range(0, num_slots, self._num_together)
        sizes = [min(self._num_together, num_slots - start) for start in starts]
        self._pieces = [copies.host((size, longest), torch.uint8) for size in sizes]

    def save(self, group: int, places: Sequence[Place]) -> None:
        rows = self._rows[group]
        if rows.num_bytes:
            self._side.store(rows.gather(self._ids(rows, places)), self._slots(rows, places))

    def load(self, group: int, places: Sequence[Place]) -> None:
        rows = self._rows[group]
        if rows.num_bytes:
            rows.scatter(self._ids(rows, places), self._side.load(self._slots(rows, places)))

    def _slots(self, rows: BlockRows, places: Sequence[Place]) -> list[Tensor]:
        pairs = [divmod(place.slot, self._num_together) for place in places]
        return [self._pieces[piece][index, : rows.num_bytes] for piece, index in pairs]

    def _ids(self, rows: BlockRows, places: Sequence[Place]) -> Tensor:
        """Return the block ids on the device. An index on the host would make it wait."""
        host = self._copies.host((len(places),), torch.int64)
        host.copy_(torch.tensor([place.block_id for place in places]))
        ids = torch.empty(len(places), dtype=torch.int64, device=rows.device)
        self._copies.upload(host, ids)
        return ids


def make_slots(
    num_slots: int,
    views: Mapping[int, KVView],
    groups: Sequence[KVGroup],
    copies: Copies | None,
) -> Slots:
    """Return the memory of slots. A device that cannot copy beside its computation waits."""
    if copies is not None and isinstance(copies, SideCopies):
        return SideSlots(num_slots, views, groups, copies, copies)
    return HostSlots(num_slots, views, groups)
