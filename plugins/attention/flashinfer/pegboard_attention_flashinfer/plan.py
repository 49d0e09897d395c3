"""What the library is told of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.attention import AttentionInputs


@dataclass(frozen=True, slots=True)
class Pages:
    """The blocks that a step reads. starts: int32 [rows + 1] on the host, of the queries. indptr:
    int32 [rows + 1] on the host, of each row's blocks. indices: int32 [blocks] on the device. last:
    int32 [rows] on the host, the keys in the last block of each row."""

    starts: Tensor
    indptr: Tensor
    indices: Tensor
    last: Tensor


def pages_of(inputs: AttentionInputs, block_size: int, window: int | None) -> Pages:
    """Return the blocks of a step for layers with this window. Blocks before the window are left
    out: the row may have lost them. The mask counts keys from the end of a row, so it stays right.

    The library copies what is on the host. These are copies of the worker's arrays, because it may
    still be copying when the next step is written. Block ids come from the device's table.
    """
    rows = inputs.num_rows
    starts = inputs.query_start_loc_cpu[: rows + 1].astype(np.int32)
    lengths = inputs.seq_lens_cpu[:rows].astype(np.int32)
    first_blocks = np.zeros_like(lengths)
    if window is not None:
        first_blocks = np.maximum(lengths - np.diff(starts) - window + 1, 0) // block_size
    counts = -(-lengths // block_size) - first_blocks
    indptr = np.zeros(rows + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    last = np.where(lengths > 0, (lengths - 1) % block_size + 1, 0).astype(np.int32)
    indices = _block_ids(inputs, block_size, window, int(indptr[-1]))
    on_host = [torch.from_numpy(array) for array in (starts, indptr, last)]
    return Pages(on_host[0], on_host[1], indices, on_host[2])


def _block_ids(inputs: AttentionInputs, block_size: int, window: int | None, total: int) -> Tensor:
    """Return the rows' block ids, one row after another: int32 [total]. Only the device's tensors
    are read."""
    rows = inputs.num_rows
    lengths = inputs.seq_lens[:rows].long()
    queries = (inputs.query_start_loc[1 : rows + 1] - inputs.query_start_loc[:rows]).long()
    first = torch.zeros_like(lengths)
    if window is not None:
        first = (lengths - queries - window + 1).clamp(min=0) // block_size
    counts = (lengths + block_size - 1) // block_size - first
    ends = counts.cumsum(0)
    places = torch.arange(total, device=lengths.device)
    row = torch.searchsorted(ends, places, right=True)
    columns = places - (ends - counts)[row] + first[row]
    return inputs.block_table[row, columns].to(torch.int32)
