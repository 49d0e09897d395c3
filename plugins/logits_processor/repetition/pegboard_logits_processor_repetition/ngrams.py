"""Lets no n tokens of an output follow each other twice within a window (vLLM's
NGramPerReqLogitsProcessor, which DeepSeek-OCR needs)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard_logits_processor_repetition.ngram_request import Ngrams, ngrams_of


class NgramProcessor:
    """Implements `pegboard.interfaces.logits_processor.LogitsProcessor`."""

    argmax_invariant = False
    host_tokens = True

    def __init__(self, options: object, setup: LogitsProcessorSetup) -> None:
        self._asked: dict[int, Ngrams] = {}
        self._outputs: dict[int, list[int]] = {}

    def update(self, added: Sequence[AddedRow], removed: np.ndarray) -> None:
        """See `LogitsProcessor.update`."""
        for row in removed.tolist():
            self._asked.pop(row, None)
            self._outputs.pop(row, None)
        for row, params, _, outputs in added:
            if (asked := ngrams_of(params)) is not None:
                self._asked[row] = asked
                self._outputs[row] = outputs.tolist()

    def apply(
        self, logits: Tensor, rows: Tensor, depth: Tensor, drafts: Callable[[], list[list[int]]]
    ) -> Tensor:
        """See `LogitsProcessor.apply`."""
        if not self._asked:
            return logits
        for place, (row, before) in enumerate(zip(rows.tolist(), drafts(), strict=True)):
            if (asked := self._asked.get(row)) is not None:
                tail = self._outputs[row][-asked.window :]
                if banned := banned_tokens([*tail, *before], asked):
                    logits[place, banned] = -torch.inf
        return logits

    def extend(self, rows: np.ndarray, token_ids: Sequence[Sequence[int]]) -> None:
        """See `LogitsProcessor.extend`."""
        for row, tokens in zip(rows.tolist(), token_ids, strict=True):
            if row in self._asked:
                self._outputs[row] += tokens


def banned_tokens(outputs: Sequence[int], asked: Ngrams) -> list[int]:
    """Return the tokens after which the last tokens would be n tokens that the window already
    has."""
    tail = np.array(outputs[-asked.window :])
    if len(tail) < asked.size:
        return []
    ends = np.arange(asked.size - 1, len(tail))
    for back in range(1, asked.size):
        ends = ends[tail[ends - back] == tail[-back]]
        if not len(ends):
            break
    return sorted({*tail[ends].tolist()} - asked.allowed)
