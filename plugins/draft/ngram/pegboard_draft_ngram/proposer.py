"""The proposer: an n-gram index per row, kept up to date with the row's new tokens."""

from __future__ import annotations

import numpy as np

from pegboard.interfaces.draft import Drafts, DraftSetup, DraftStep
from pegboard_draft_ngram.index import NGramIndex
from pegboard_draft_ngram.options import NGramOptions
from pegboard_drafts.lengths import DraftLengths

NONE = np.zeros(0, np.int32)


class NGramProposer:
    """Implements `pegboard.interfaces.draft.DraftProposer`. The method is prompt lookup decoding
    (Saxena 2023), with vLLM's rule: the longest n-gram decides, and of its occurrences the first
    one."""

    def __init__(self, options: NGramOptions, setup: DraftSetup) -> None:
        self._options = options
        self._lengths = DraftLengths(setup)
        self._indexes: dict[int, NGramIndex] = {}

    def add(self, row: int, token_ids: np.ndarray) -> None:
        """See `DraftProposer.add`."""
        self._lengths.add(row)
        self._indexes[row] = NGramIndex(token_ids, self._options.shortest, self._options.longest)

    def remove(self, rows: np.ndarray) -> None:
        """See `DraftProposer.remove`."""
        for row in rows.tolist():
            self._indexes.pop(row, None)

    def propose(self, step: DraftStep) -> Drafts:
        """See `DraftProposer.propose`."""
        proposals = []
        for row, history, most in zip(
            step.rows.tolist(), step.history, self._lengths.wanted(step), strict=True
        ):
            if not most:
                proposals.append(NONE)
                continue
            index = self._indexes[row]
            index.append(history, index.num_tokens)
            start = index.find(history)
            proposals.append(NONE if start is None else history[start : start + most].copy())
        return Drafts(self._lengths.cut(step, proposals))
