"""The largest step there can be, to see how much memory it takes."""

from __future__ import annotations

import numpy as np

from pegboard.config.limits import Limits
from pegboard.data.batch import Batch, BlockDelta, NewRequest
from pegboard.data.sampling_params import SamplingParams


def largest_batch(limits: Limits, num_groups: int) -> Batch:
    """Every row starts a prompt, as long as they fit together, and samples. All of them lie in block 0."""
    num_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    counts = np.full(num_rows, limits.max_num_batched_tokens // num_rows, np.int32)
    counts[: limits.max_num_batched_tokens % num_rows] += 1
    counts = np.minimum(counts, limits.max_model_len)
    blocks = (np.zeros(0, np.int32),) * num_groups
    rows, none = np.arange(num_rows, dtype=np.int32), np.zeros(num_rows, np.int32)
    new = [
        NewRequest(row, f"row {row}", np.zeros(count, np.int32), count, 0, SamplingParams(), None, blocks)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True)
    ]
    return Batch(
        step=0, rows=rows, num_scheduled_tokens=counts, num_computed_tokens=none, num_draft_tokens=none,
        samples=np.ones(num_rows, bool), new=new, removed_rows=none[:0], new_blocks=BlockDelta.empty(),
        copy_blocks=np.zeros((0, 3), np.int32),
    )  # fmt: skip
