"""Vectors as long as the vocabulary, made of the logits of words (SPLADE, Formal et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.pooler import PoolStep
from pegboard_pooler_sentence.reduce import AT_ONCE, make_reduction


class WordPooling:
    """The largest value or the sum, over a prompt's tokens, of log(1 + x), where x is an activation
    of the logits of words. It is a `Reduction`. activation: relu, or log1p_relu, which is log(1 +
    relu). how: MAX or SUM."""

    def __init__(self, activation: str, how: str) -> None:
        self._logs = 2 if activation == "log1p_relu" else 1
        self._is_largest = how == "MAX"
        self._reduction = make_reduction(how)

    def reduce(self, hidden: Tensor, step: PoolStep) -> Tensor:
        """See `Reduction.reduce`. Returns float32 [S, V]."""
        vectors = [
            self._reduction.reduce(self._values(hidden[start:stop], piece), piece)
            for start, stop, piece in pieces_of(step)
        ]
        joined = vectors[0] if len(vectors) == 1 else torch.cat(vectors)
        # what is the largest before the logarithm is the largest after it
        return self._activated(joined) if self._is_largest else joined

    def _values(self, hidden: Tensor, step: PoolStep) -> Tensor:
        logits = step.classify(hidden)
        return logits if self._is_largest else self._activated(logits)

    def _activated(self, logits: Tensor) -> Tensor:
        values = logits.relu()
        for _ in range(self._logs):
            values = values.log1p()
        return values

    def remove(self, row: int) -> None:
        """See `Reduction.remove`."""
        self._reduction.remove(row)


def pieces_of(step: PoolStep) -> Iterator[tuple[int, int, PoolStep]]:
    """Divide a step into steps of at most AT_ONCE tokens. Yields the first token of each, the one
    after its last, and the step, whose prompts are those that have tokens there."""
    starts = step.starts.astype(np.int64)
    total = int(starts[-1])
    for start in range(0, total, AT_ONCE):
        stop = min(start + AT_ONCE, total)
        first = int(np.searchsorted(starts, start, side="right")) - 1
        last = int(np.searchsorted(starts, stop, side="left"))
        prompts = slice(first, last)
        bounds = slice(first, last + 1)
        offsets = step.offsets[prompts] + np.maximum(start - starts[prompts], 0)
        yield (
            start,
            stop,
            replace(
                step,
                rows=step.rows[prompts],
                offsets=offsets,
                starts=(starts[bounds].clip(start, stop) - start).astype(np.int32),
                starts_on_device=step.starts_on_device[bounds].clamp(start, stop) - start,
                ends=step.ends[prompts] & (starts[first + 1 : last + 1] <= stop),
                last=None,
                token_ids=step.token_ids[start:stop],
                params=step.params[prompts],
            ),
        )
