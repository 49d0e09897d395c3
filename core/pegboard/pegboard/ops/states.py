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
    addresses in every step. Kernels on devices need no more than these.

    table: int32 [B, n], whose first column has indices of states. n > 1: a row may have drafts, and
    so several tokens. seq_lens: int32 [B], the tokens of each row with those of this step.
    query_start_loc: int32 [B + 1]; row b has the tokens from query_start_loc[b] to
    query_start_loc[b + 1]. starts: the same numbers on the host; None = a padded step, which only
    the device knows. Its last rows have no tokens, and only kernels know rows of several tokens.
    Nothing from the device is kept: a recording must compute it again.
    """

    table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    starts: list[int] | None

    @property
    def blocks(self) -> Tensor:
        """int64 [B]: indices of states."""
        return self.table[:, 0].long()

    @property
    def is_new(self) -> Tensor:
        """bool [B]: the state is zero, whatever its memory contains."""
        return self.seq_lens == self.query_start_loc.diff()

    @property
    def single(self) -> tuple[Tensor | slice, Tensor, Tensor]:
        """The tokens of the first rows, which have one token each, their blocks, and whether they
        are new. In a padded step, rows without tokens repeat the first row."""
        rows: Tensor | slice = (
            slice(self._num_single)
            if self.starts is not None
            else torch.arange(len(self.seq_lens), device=self.table.device) * (self.seq_lens > 0)
        )
        return rows, self.blocks[rows], self.is_new[rows]

    @cached_property
    def _num_single(self) -> int:
        return sum(start == row for row, start in enumerate(self.starts or ())) - 1

    def longer(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (tokens, block [1], is new [1]) of each row after the first ones of one token."""
        for row, bounds in enumerate(pairwise(self.starts or ())):
            if row >= self._num_single:
                yield slice(*bounds), self.blocks[row : row + 1], self.is_new[row : row + 1]
