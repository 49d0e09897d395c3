"""What a rank knows about every running row, in arrays that are indexed by row."""

from __future__ import annotations

import numpy as np

from pegboard.data.batch import Batch, NewRequest
from pegboard.interfaces.attention import KVPlan

ON_DEVICE = -2
"""Replaces a sampled token that so far only the device knows."""


class RowState:
    """The state of R rows. token_ids [R, capacity]: prompt and outputs, followed by room for drafts. num_tokens [R]: number of
    known tokens. block_tables[g] [R, max_blocks of group g] and num_blocks[g] [R]. drafts: proposals for the next step."""

    def __init__(self, max_num_seqs: int, capacity: int, plan: KVPlan) -> None:
        self.token_ids = np.zeros((max_num_seqs, capacity), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.drafts: dict[int, np.ndarray] = {}
        self.block_tables = []
        self.num_blocks = []
        for group in plan.groups:
            width = -(-capacity // group.block_size) + 1 if group.spec.unit == "token" else capacity
            self.block_tables.append(np.zeros((max_num_seqs, width), np.int32))
            self.num_blocks.append(np.zeros(max_num_seqs, np.int64))

    def add(self, new: NewRequest) -> None:
        """Fill a row."""
        row, count = new.row, len(new.token_ids)
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.drafts.pop(row, None)
        for group, block_ids in enumerate(new.block_ids):
            self.block_tables[group][row, : len(block_ids)] = block_ids
            self.num_blocks[group][row] = len(block_ids)

    def append_blocks(self, batch: Batch) -> None:
        """Apply the batch's `new_blocks`."""
        delta = batch.new_blocks
        for index in range(len(delta.rows)):
            row, group, block_ids = int(delta.rows[index]), int(delta.groups[index]), delta.block_ids.row(index)
            first = self.num_blocks[group][row]
            self.block_tables[group][row, first : first + len(block_ids)] = block_ids
            self.num_blocks[group][row] = first + len(block_ids)

    def remove(self, rows: np.ndarray) -> None:
        """Free these rows."""
        for row in rows.tolist():
            self.drafts.pop(row, None)

    def append_unread(self, rows: np.ndarray) -> None:
        """Add to each of rows [B] a new token that so far only the device knows."""
        self.token_ids[rows, self.num_tokens[rows]] = ON_DEVICE
        self.num_tokens[rows] += 1

    def append_tokens(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Add tokens [B, m] to rows [B]. The first counts[i] of them belong to rows[i], at least one."""
        self.token_ids[rows, self.num_tokens[rows]] = tokens[:, 0]
        self.num_tokens[rows] += 1
        for column in range(1, tokens.shape[1]):
            has = counts > column
            taking = rows[has]
            self.token_ids[taking, self.num_tokens[taking]] = tokens[has, column]
            self.num_tokens[taking] += 1
