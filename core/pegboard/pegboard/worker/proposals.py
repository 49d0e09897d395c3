"""What a draft plugin has proposed, until a step verifies it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pegboard.data.batch import Batch


class Proposals:
    """token_ids: row → its draft tokens, if the host knows them. probs: row → the probabilities
    [n, V] with which they were drawn, if they were."""

    def __init__(self) -> None:
        self.token_ids: dict[int, np.ndarray] = {}
        self.probs: dict[int, Tensor] = {}

    def keep(
        self, rows: np.ndarray, token_ids: Sequence[np.ndarray], probs: Tensor | None = None
    ) -> None:
        """Keep new proposals of rows [B]. probs: see `Drafts`."""
        self.token_ids.update(zip(rows.tolist(), token_ids, strict=True))
        parts = None if probs is None else probs.split([len(ids) for ids in token_ids])
        self.keep_probs(rows, parts)

    def keep_probs(self, rows: np.ndarray, probs: Sequence[Tensor] | None) -> None:
        """Keep the probabilities of new proposals of rows [B], [n, V] for each."""
        if probs is not None:
            self.probs.update(zip(rows.tolist(), probs, strict=True))
        else:
            for row in rows.tolist() if self.probs else ():
                self.probs.pop(row, None)

    def remove(self, rows: np.ndarray) -> None:
        """Forget those of these rows."""
        for row in rows.tolist():
            self.token_ids.pop(row, None)
            self.probs.pop(row, None)

    def verified(self, batch: Batch) -> list[tuple[int, np.ndarray]]:
        """Return the drafts that a step verifies, with their rows. The engine may have sent
        them."""
        sent = batch.draft_token_ids
        counts = batch.num_draft_tokens
        drafts = []
        for index in np.flatnonzero(counts).tolist():
            row = int(batch.rows[index])
            ids = self.token_ids[row] if sent is None else sent.row(index)
            drafts.append((row, ids[: counts[index]]))
        return drafts

    def probs_of(self, rows: np.ndarray, counts: np.ndarray) -> Tensor | None:
        """Return the probabilities [N, V] of the first counts [B] drafts of rows [B]. A row without
        chance has zeros. None = no draft was drawn."""
        known = [self.probs[row] for row in rows.tolist() if row in self.probs]
        if not known:
            return None
        nothing = known[0].new_zeros(1, known[0].shape[1])
        parts = [
            self.probs[row][:count] if row in self.probs else nothing.expand(count, -1)
            for row, count in zip(rows.tolist(), counts.tolist(), strict=True)
        ]
        return torch.cat(parts)
