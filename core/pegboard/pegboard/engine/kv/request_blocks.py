"""The blocks of one request."""

from __future__ import annotations

NewBlocks = tuple[list[int], ...]
"""Block ids appended to a request's tables, per group."""

Copy = tuple[int, int, int]
"""(group, source block, destination block)."""


class RequestBlocks:
    """The block tables of one request. capacity: how many tokens fit its blocks. wake_at: below
    this number of tokens `commit` has nothing to do. checkpoint: (number of tokens, blocks) of a
    state copy that the prefix cache cannot find yet. checkpoint_at: the last place, in tokens,
    where a state was to be copied."""

    __slots__ = (
        "tables",
        "capacity",
        "wake_at",
        "num_hashed",
        "num_dropped",
        "checkpoint",
        "checkpoint_at",
        "keeps_for_children",
    )

    def __init__(self, num_groups: int) -> None:
        self.tables: NewBlocks = tuple([] for _ in range(num_groups))
        self.capacity = 0
        self.wake_at = 0
        self.num_hashed = [0] * num_groups
        self.num_dropped = [0] * num_groups
        self.keeps_for_children = True
        self.checkpoint: tuple[int, tuple[int, ...]] | None = None
        self.checkpoint_at = 0
