"""A draft proposer that is right with a given probability; its choices are reproducible."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from pegboard.interfaces.draft import Drafts, DraftSetup, DraftStep


def draft_step(
    rows: Sequence[int], history: Sequence[Sequence[int]], max_drafts: Sequence[int]
) -> DraftStep:
    """Return a step that has verified no drafts."""
    return DraftStep(
        rows=np.array(rows, np.int32),
        history=[np.array(text, np.int32) for text in history],
        max_drafts=np.array(max_drafts, np.int32),
        num_verified=np.zeros(len(rows), np.int32),
        num_new=np.ones(len(rows), np.int32),
    )


class FakeDraft:
    """accuracy: the probability that a proposal is right. target, set before the first step: (row,
    token ids) → the true next token (FakeWorker.next_of_row). The number of proposals is between 0
    and the limit and depends on the history."""

    def __init__(self, setup: DraftSetup, *, accuracy: float = 0.7) -> None:
        self._setup = setup
        self._accuracy = accuracy
        self.target: Callable[[int, list[int]], int] | None = None
        self.rows: set[int] = set()

    def add(self, row: int, token_ids: np.ndarray) -> None:
        self.rows.add(row)

    def remove(self, rows: np.ndarray) -> None:
        self.rows -= set(rows.tolist())

    def propose(self, step: DraftStep) -> Drafts:
        proposals = []
        for row, history, limit in zip(
            step.rows.tolist(), step.history, step.max_drafts.tolist(), strict=True
        ):
            assert row in self.rows
            count = zlib.crc32(history.tobytes()) % (limit + 1)
            proposals.append(self._chain(row, history.tolist(), count))
        return Drafts(proposals)

    def _chain(self, row: int, token_ids: list[int], count: int) -> np.ndarray:
        assert self.target is not None
        start = len(token_ids)
        for _ in range(count):
            token = self.target(row, token_ids)
            luck = zlib.crc32(np.array(token_ids, np.int64).tobytes(), 1) / 2**32
            token_ids.append(
                token if luck < self._accuracy else (token + 1) % self._setup.limits.vocab_size
            )
        return np.array(token_ids[start:], np.int32)
