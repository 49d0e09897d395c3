"""Ranks that share out the items of a step: each item is encoded by one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pegboard.data.media import MediaItem
from pegboard.layers.shards import Group
from pegboard.worker.borders import DTYPES


class ItemOwners:
    """The ranks of a group. All of them call the same methods with the same items."""

    def __init__(self, group: Group, device: str) -> None:
        self.group = group
        self.device = device

    def of(self, items: Sequence[MediaItem]) -> list[int]:
        """Return the rank that encodes each item, so that all of them make nearly as many rows."""
        loads = [0] * self.group.size
        owners = [0] * len(items)
        for index in sorted(range(len(items)), key=lambda index: -items[index].num_rows):
            owners[index] = loads.index(min(loads))
            loads[owners[index]] += items[index].num_rows
        return owners

    def exchange(
        self,
        items: Sequence[MediaItem],
        owners: Sequence[int],
        rows: Mapping[str, tuple[Tensor, bool]],
    ) -> dict[str, tuple[Tensor, bool]]:
        """Return the rows of all items, and a note on each, by their digests. rows: those of this
        rank's items."""
        collective = self.group.collective
        if collective is None:
            return {**rows}
        forms = [
            [given[0].shape[1], DTYPES.index(given[0].dtype), given[1]] if given else [0, 0, 0]
            for given in (rows.get(item.digest) for item in items)
        ]
        table = torch.tensor(forms, dtype=torch.float32, device=self.device)  # only floats add up
        every = {}
        for item, owner, form in zip(
            items, owners, collective.all_reduce(table).int().tolist(), strict=True
        ):
            width, dtype, note = form
            if item.digest in rows:
                given = rows[item.digest][0].contiguous()
            else:
                given = torch.empty(item.num_rows, width, dtype=DTYPES[dtype], device=self.device)
            every[item.digest] = collective.broadcast(given, owner), bool(note)
        return every
