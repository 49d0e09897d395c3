"""Rows that engines exchange because each of them has some of the experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pegboard.layers.shards import Group


class EngineRows:
    """The rows of a step of all engines. experts: the ranks of all engines. engines: those of them
    that have the place of this rank in their engine; each holds the rows of its engine. count: rows
    of this engine in the step that is computed now. size: the most that an engine has."""

    def __init__(self, experts: Group, engines: Group, device: str) -> None:
        self.experts = experts
        self.engines = engines
        self._device = device
        self.count = 0
        self.size = 0

    def agree(self, count: int, wave: tuple[bool, bool, int]) -> tuple[bool, bool]:
        """Exchange how many rows the engines have in the next step. wave: see `Batch`. Return
        whether no engine has requests to compute, and whether the engines may stop: none has, no
        action waits, and all have seen the same messages."""
        mine = torch.tensor([[count, *wave]], dtype=torch.int64, device=self._device)
        reports = self.engines.all_rows(mine).tolist()
        self.count = count
        self.size = max(rows for rows, *_ in reports)
        is_quiet = len({number for *_, number in reports}) == 1 and not any(
            works for _, works, _, _ in reports
        )
        return is_quiet, is_quiet and not any(waits for _, _, waits, _ in reports)

    def on_all(
        self, compute: Callable[[Tensor, Tensor, Tensor], Tensor], padding: int
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return the sum over all ranks of `compute` of the rows of all engines, for the rows of
        this engine: (x [T, in], weights [T, k], ids [T, k]) → [T, out]. padding: the id of no
        expert."""
        add_up = self.experts.summed(lambda total: total)
        rank = self.engines.rank

        def call(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            total = add_up(compute(*self._gathered(x, weights, ids, padding)))
            return total[self.size * rank :][: min(self.size, len(x))]

        return call

    def _gathered(self, x: Tensor, weights: Tensor, ids: Tensor, padding: int) -> list[Tensor]:
        """Return the tensors of all engines below each other, which travel as one."""
        padded = (self._padded(x), self._padded(weights), self._padded(ids, padding))
        parts = [part.view(torch.uint8) for part in padded]
        rows = self.engines.all_rows(torch.cat(parts, 1))
        pieces = rows.split([part.shape[1] for part in parts], 1)
        return [
            piece.contiguous().view(part.dtype) for piece, part in zip(pieces, padded, strict=True)
        ]

    def _padded(self, part: Tensor, value: int = 0) -> Tensor:
        rows = part[: self.count]
        return functional.pad(rows, (0, 0, 0, self.size - len(rows)), value=value).contiguous()
