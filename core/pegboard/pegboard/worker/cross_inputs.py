"""The inputs of cross attention, whose keys and values come from an encoder."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pegboard.interfaces.attention import AttentionInputs
from pegboard.worker.buffers import Buffer


class CrossInputs:
    """The steps of one KV group that stores the output of an encoder. Every token is a row of its
    own, which attends to all that its request has.

    blocks: [R, max_blocks], those of all requests. num_rows: [R], of the encoder's output. make:
    returns a buffer of a shape. size: the most tokens of a step.
    """

    def __init__(
        self,
        block_size: int,
        blocks: np.ndarray,
        num_rows: np.ndarray,
        make: Callable[..., Buffer],
        size: int,
    ) -> None:
        self.block_size = block_size
        self.blocks = blocks
        self.num_rows = num_rows
        self.starts = make(size + 1, dtype=torch.int32)
        self.lens = make(size, dtype=torch.int32)
        self.table = make(size, self.blocks.shape[1], dtype=torch.int32)
        self.slots = make(size)
        for array in self.slots.arrays:
            array.fill(-1)
        self.count = np.arange(size + 1, dtype=np.int32)

    def fill(self, token_rows: np.ndarray) -> None:
        """Fill the buffers for tokens of these rows [T]."""
        size = len(token_rows)
        self.lens.array[:size] = self.num_rows[token_rows]
        self.table.array[:size] = self.blocks[token_rows]

    def send(self, num_tokens: int, padded: int) -> AttentionInputs:
        """Return the inputs of a step. padded: its number of tokens, with those that have no
        row."""
        starts = self.starts.array[: padded + 1]
        np.minimum(self.count[: padded + 1], num_tokens, out=starts)
        self.lens.array[num_tokens:padded] = 0
        self.table.array[num_tokens:padded] = 0
        return AttentionInputs(
            num_rows=num_tokens,
            num_tokens=num_tokens,
            query_start_loc=self.starts.sent(padded + 1),
            query_start_loc_cpu=starts,
            seq_lens=self.lens.sent(padded),
            seq_lens_cpu=self.lens.array[:padded],
            block_table=self.table.sent(padded, self.table.array.shape[1]),
            block_table_cpu=self.table.array[:padded],
            slot_mapping=self.slots.sent(padded),
        )

    def storing(self, row: int, device: str) -> AttentionInputs:
        """Return the inputs of the call that stores the encoder's output for a row. Its tokens
        attend to one slot each, because nobody reads what comes of it."""
        size = int(self.num_rows[row])
        blocks, inside = np.divmod(np.arange(size), self.block_size)
        slots = self.blocks[row, blocks].astype(np.int64) * self.block_size + inside
        starts = np.arange(size + 1, dtype=np.int32)
        lens = np.ones(size, np.int32)
        table = np.zeros((size, 1), np.int32)
        return AttentionInputs(
            num_rows=size,
            num_tokens=size,
            query_start_loc=torch.from_numpy(starts).to(device),
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(lens).to(device),
            seq_lens_cpu=lens,
            block_table=torch.from_numpy(table).to(device),
            block_table_cpu=table,
            slot_mapping=torch.from_numpy(slots).to(device),
        )
