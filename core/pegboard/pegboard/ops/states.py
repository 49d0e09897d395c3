"""Where the rows of a step have their states: layers with a state per request instead of keys and
values per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor


@dataclass
class StateRows:
    """Where the rows of a step have their states. The tensors may be longer, and have the same
    addresses in every step.

    table: int32 [B, n], whose first column has indices of states. seq_lens: int32 [B], the tokens
    of each row with those of this step. query_start_loc: int32 [B + 1]; row b has the tokens from
    query_start_loc[b] to query_start_loc[b + 1]. starts: the same numbers on the host.
    """

    table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    starts: list[int]

    @cached_property
    def blocks(self) -> Tensor:
        """int64 [B]: indices of states."""
        return self.table[: len(self.starts) - 1, 0].long()

    @cached_property
    def is_new(self) -> Tensor:
        """bool [B]: the state is zero, whatever its memory contains."""
        count = len(self.starts) - 1
        return self.seq_lens[:count] == self.query_start_loc[: count + 1].diff()

    @cached_property
    def single(self) -> tuple[Tensor | slice, Tensor, Tensor]:
        """The tokens of the rows of one token, their blocks, and whether they are new."""
        if len(self.starts) - 1 == self.starts[-1]:
            return slice(None), self.blocks, self.is_new
        singles = [
            row for row, (first, end) in enumerate(pairwise(self.starts)) if end - first == 1
        ]
        rows = torch.tensor(singles, dtype=torch.int64, device=self.blocks.device)
        return self.query_start_loc[rows].long(), self.blocks[rows], self.is_new[rows]

    def longer(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield (first token, end, block, is new) of each row of several tokens."""
        for row, (first, end) in enumerate(pairwise(self.starts)):
            if end - first > 1:
                yield first, end, int(self.blocks[row]), bool(self.is_new[row])
