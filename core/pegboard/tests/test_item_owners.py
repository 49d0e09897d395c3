"""Ranks that share out the items of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pegboard.data.media import MediaItem
from pegboard.layers.shards import Group
from pegboard.worker.item_owners import ItemOwners

counts = st.lists(st.integers(1, 50), max_size=8)


def items_of(counts: Sequence[int]) -> list[MediaItem]:
    return [MediaItem("image", f"d{i}", ((0, count),), {}) for i, count in enumerate(counts)]


@given(counts, st.integers(1, 4))
def test_every_item_has_one_owner(counts: list[int], size: int) -> None:
    """No rank makes more rows than another one with the largest of its items."""
    owners = ItemOwners(Group(0, size), "cpu").of(items_of(counts))
    loads = [
        sum(count for count, owner in zip(counts, owners, strict=True) if owner == rank)
        for rank in range(size)
    ]
    assert sum(loads) == sum(counts) and len(owners) == len(counts)
    assert max(loads) - min(loads) <= max(counts, default=0)


class Meeting:
    """The exchanges of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: list[Tensor] = [torch.empty(0)] * size

    def join(self, rank: int) -> "Member":
        return Member(self, rank)


class Member:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank

    def _exchange(self, x: Tensor, result: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self.meeting.given[self.rank] = x
        self.meeting.barrier.wait()
        value = result(self.meeting.given).clone()
        self.meeting.barrier.wait()
        return value

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_floating_point()
        return self._exchange(x, lambda each: torch.stack(each).sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        return self._exchange(x, lambda each: torch.cat(each, 1))

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._exchange(x, lambda each: each[source])

    def close(self) -> None:
        pass


@given(counts, st.integers(2, 3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_all_ranks_get_all_rows(counts: list[int], size: int, dtype: torch.dtype) -> None:
    """Their widths may differ, and ranks may have none."""
    items = items_of(counts)
    rows = {
        item.digest: (torch.randn(item.num_rows, 3 + index).to(dtype), index % 2 == 0)
        for index, item in enumerate(items)
    }
    meeting = Meeting(size)
    results: list[dict[str, tuple[Tensor, bool]]] = [{} for _ in range(size)]

    def run(rank: int) -> None:
        ranks = ItemOwners(Group(rank, size, meeting.join(rank)), "cpu")
        owners = ranks.of(items)
        own = {
            item.digest: rows[item.digest]
            for item, owner in zip(items, owners, strict=True)
            if owner == rank
        }
        results[rank] = ranks.exchange(items, owners, own)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for every in results:
        assert every.keys() == rows.keys()
        for digest, (values, note) in every.items():
            assert values.equal(rows[digest][0]) and note == rows[digest][1]
