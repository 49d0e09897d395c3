"""What the layers of one step share.

Letters: R rows, N new tokens of each, L keys of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.attention import AttentionInputs, AttentionLayer


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows with equally many new tokens. tokens: int64 [R, N], their places in the step. blocks,
    offsets: int64 [R, L], where the keys are in the cache. visible: bool [R, 1, N, L]."""

    tokens: Tensor
    blocks: Tensor
    offsets: Tensor
    visible: Tensor


def rows_of(inputs: AttentionInputs, layer: AttentionLayer, block_size: int) -> list[Rows]:
    """Return the rows of a step, those with equally many new tokens together."""
    starts = inputs.query_start_loc_cpu[: inputs.num_rows + 1]
    counts = np.diff(starts)
    return [
        _rows(inputs, layer, block_size, np.flatnonzero(counts == count), int(count))
        for count in np.unique(counts)
        if count
    ]


def _rows(
    inputs: AttentionInputs, layer: AttentionLayer, block_size: int, rows: np.ndarray, count: int
) -> Rows:
    """Return the given rows, which have `count` new tokens each. Keys before the first visible one
    are not read: a cache with a window may have dropped their blocks."""
    new = np.arange(count)
    lengths = inputs.seq_lens_cpu[rows, None].astype(np.int64)  # [R, 1]
    last = lengths - count + new  # [R, N], the position of the new token
    first = first_visible(last, layer)
    before = first.min(1, keepdims=True)  # [R, 1]
    keys = before + np.arange((lengths - before).max())  # [R, L]
    visible = (keys[:, None] <= last[:, :, None]) & (keys[:, None] >= first[:, :, None])
    # a short row reads its last key again in place of keys that it does not have
    keys = np.minimum(keys, lengths - 1)
    blocks = inputs.block_table_cpu[rows[:, None], keys // block_size].astype(np.int64)
    tokens = inputs.query_start_loc_cpu[rows, None].astype(np.int64) + new
    arrays = tokens, blocks, keys % block_size, visible[:, None]
    device = inputs.block_table.device
    return Rows(*(torch.from_numpy(each).to(device) for each in arrays))


def first_visible(positions: np.ndarray, layer: AttentionLayer) -> np.ndarray:
    """Return the first position that a token at each of the positions attends to."""
    if layer.window is not None:
        return np.maximum(positions - layer.window + 1, 0)
    if layer.chunk is not None:
        return positions // layer.chunk * layer.chunk
    return np.zeros_like(positions)
