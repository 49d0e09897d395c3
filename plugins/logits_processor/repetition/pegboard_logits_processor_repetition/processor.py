"""Ends an output whose last tokens are the same pattern several times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard_logits_processor_repetition.options import RepetitionOptions
from pegboard_logits_processor_repetition.request import stops

CERTAIN = 1e4
"""How far the logits of the end are above all others. Where a grammar or min_tokens forbids the
end, it stays forbidden."""


class RepetitionProcessor:
    """Implements `pegboard.interfaces.logits_processor.LogitsProcessor`."""

    argmax_invariant = False
    host_tokens = True

    def __init__(self, options: RepetitionOptions, setup: LogitsProcessorSetup) -> None:
        self._sizes = range(options.min_pattern_size, options.max_pattern_size + 1)
        self._count = options.min_count
        self._outputs: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}

    def update(self, added: Sequence[AddedRow], removed: np.ndarray) -> None:
        """See `LogitsProcessor.update`."""
        for row in removed.tolist():
            self._outputs.pop(row, None)
        for row, params, _, outputs in added:
            if stops(params) and params.eos_token_ids:
                self._outputs[row] = outputs.tolist()
                self._ends[row] = params.eos_token_ids

    def apply(
        self, logits: Tensor, rows: Tensor, depth: Tensor, drafts: Callable[[], list[list[int]]]
    ) -> Tensor:
        """See `LogitsProcessor.apply`."""
        if not self._outputs:
            return logits
        for place, (row, before) in enumerate(zip(rows.tolist(), drafts(), strict=True)):
            outputs = self._outputs.get(row)
            if outputs is None or not self.repeats(
                [*outputs[-self._sizes[-1] * self._count :], *before]
            ):
                continue
            best = logits[place, self._ends[row]].max()
            if best > -torch.inf:
                logits[place, self._ends[row]] += logits[place].max() - best + CERTAIN
        return logits

    def extend(self, rows: np.ndarray, token_ids: Sequence[Sequence[int]]) -> None:
        """See `LogitsProcessor.extend`."""
        for row, tokens in zip(rows.tolist(), token_ids, strict=True):
            if row in self._outputs:
                self._outputs[row] += tokens

    def repeats(self, tokens: Sequence[int]) -> bool:
        """Return whether the last tokens are `min_count` times the same pattern of one of the
        sizes."""
        last = np.array(tokens[::-1])
        return any(
            len(last) >= size * self._count
            and np.array_equal(last[: size * (self._count - 1)], last[size : size * self._count])
            for size in self._sizes
            if size < len(last) and last[0] == last[size]
        )
