"""How many keys each token attends to, in layers whose tokens see the end of their item."""

from __future__ import annotations

import numpy as np

from pegboard.data.batch import Batch, NewRequest


class VisibleKeys:
    """num_keys: [R, capacity] int32, for the token at each position of each row. stops: [R], the
    position after the last token that attends to a later one."""

    def __init__(self, max_num_seqs: int, capacity: int) -> None:
        self.causal = np.arange(1, capacity + 1, dtype=np.int32)
        self.num_keys = np.tile(self.causal, (max_num_seqs, 1))
        self.stops = np.zeros(max_num_seqs, np.int64)

    def add(self, new: NewRequest) -> None:
        """Fill a row."""
        self.num_keys[new.row] = self.causal
        for start, stop in new.whole:
            self.num_keys[new.row, start:stop] = stop
        self.stops[new.row] = max((stop - 1 for _, stop in new.whole), default=0)

    def matters(self, batch: Batch) -> bool:
        """Return whether a token of the step may attend to a later one."""
        return bool((batch.num_computed_tokens < self.stops[batch.rows]).any())

    def of(self, token_rows: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """Return the numbers [T] of tokens at `positions` [T] of rows [T], or None if they attend
        to no later ones."""
        num_keys: np.ndarray = self.num_keys[token_rows, positions]
        return num_keys if bool((num_keys > positions + 1).any()) else None
