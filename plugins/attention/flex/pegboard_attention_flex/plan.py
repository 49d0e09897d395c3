"""How a step is divided into calls of flex_attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from pegboard.interfaces.attention import AttentionInputs, Chunk, Retain, Window

MOST_BATCHED = 16
"""Rows with at most this many tokens are computed together, if they have equally many."""
QUERIES = 128
"""Queries of a longer row that are computed together, because their scores take memory."""


@dataclass
class Part:
    """Rows with equally many queries, or some queries of one row.

    tokens: of the step. rows: how many. last: int64 [rows, queries], the position of the last key
    that each query attends to. position: the same shape, its own position. blocks: int64 [rows,
    blocks], which hold the keys from position 0 on. block_size: in tokens."""

    tokens: slice
    rows: int
    last: Tensor
    position: Tensor
    blocks: Tensor
    block_size: int

    def __post_init__(self) -> None:
        self._masks: dict[Retain, BlockMask] = {}
        self._unseen: dict[Retain, Tensor] = {}

    @property
    def num_queries(self) -> int:
        """Queries of each row."""
        return self.last.shape[1]

    @cached_property
    def num_keys(self) -> int:
        """Keys of each row, with those after its last token."""
        return self.blocks.shape[1] * self.block_size

    def first(self, rule: Retain) -> Tensor:
        """Return the position of the first key that each query attends to: [rows, queries]."""
        if isinstance(rule, Window):
            return self.position - rule.tokens + 1
        if isinstance(rule, Chunk):
            return self.position // rule.tokens * rule.tokens
        return torch.zeros_like(self.position)

    def mask(self, rule: Retain) -> BlockMask:
        """Return which key each query attends to."""
        if rule not in self._masks:
            first = self.first(rule)
            last = self.last

            def is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return (j >= first[b, i]) & (j <= last[b, i])

            shape = (self.rows, None, self.num_queries, self.num_keys)
            self._masks[rule] = create_block_mask(is_seen, *shape, device=last.device)
        return self._masks[rule]

    def unseen(self, rule: Retain) -> Tensor:
        """Return which keys no query of a row attends to: bool [rows, keys]. Nothing may be stored
        there but what another layer left, which may mean NaN, and 0 · NaN is not 0."""
        if rule not in self._unseen:
            keys = torch.arange(self.num_keys, device=self.last.device)
            first = self.first(rule).amin(1, keepdim=True)
            self._unseen[rule] = (keys < first) | (keys > self.last.amax(1, keepdim=True))
        return self._unseen[rule]


def parts_of(inputs: AttentionInputs, block_size: int, most_queries: int | None) -> Iterator[Part]:
    """Yield the parts of a step. most_queries: of a long row in one part; None = all.

    Sizes come from the host's arrays, and all else from the device's tensors, so that nothing is
    copied to the device.
    """
    starts = inputs.query_start_loc_cpu[: inputs.num_rows + 1].tolist()
    lengths = inputs.seq_lens_cpu[: inputs.num_rows].tolist()
    counts = [stop - start for start, stop in zip(starts, starts[1:], strict=False)]
    row = 0
    while row < inputs.num_rows:
        count = counts[row]
        stop = row + 1
        if count <= MOST_BATCHED:
            while stop < inputs.num_rows and counts[stop] == count:
                stop += 1
        width = -(-max(lengths[row:stop]) // block_size)
        if count and width:
            size = count if count <= MOST_BATCHED else most_queries or count
            for first in range(0, count, size):
                queries = slice(first, min(first + size, count))
                yield _part(
                    inputs, slice(row, stop), queries, starts[row], count, width, block_size
                )
        row = stop


def _part(
    inputs: AttentionInputs,
    rows: slice,
    queries: slice,
    start: int,
    count: int,
    width: int,
    block_size: int,
) -> Part:
    """Return the part with these queries of rows that have `count` each. start: their first token.
    width: blocks of the longest one."""
    num_rows = rows.stop - rows.start
    tokens = slice(start + queries.start, start + (num_rows - 1) * count + queries.stop)
    lengths = inputs.seq_lens[rows].long().unsqueeze(1)
    numbers = torch.arange(queries.start, queries.stop, device=lengths.device)
    position = lengths - count + numbers
    last = position
    if inputs.num_keys is not None:
        last = inputs.num_keys[tokens].long().view(num_rows, -1) - 1
    blocks = inputs.block_table[rows, :width].long()
    return Part(tokens, num_rows, last, position, blocks, block_size)
