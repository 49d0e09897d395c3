"""The proposer of Medusa heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pegboard.interfaces.draft import DraftSetup
from pegboard_drafts.heads import HeadsProposer


class MedusaProposer(HeadsProposer):
    """Implements `pegboard.interfaces.draft.DraftProposer`. Head k proposes the token that is k + 2
    places after the one whose hidden states it reads."""

    def __init__(self, options: None, setup: DraftSetup) -> None:
        super().__init__(setup, self.compute)
        self._token_ids: Tensor | None = self.forwards.model.token_ids

    def compute(self, hidden: Tensor, last_ids: np.ndarray, sizes: list[int]) -> Sequence[Tensor]:
        """See `pegboard_drafts.heads.Compute`."""
        logits = self.forwards.logits(hidden).unflatten(-1, (self._most_drafts, -1))
        best = logits.argmax(-1)
        if self._token_ids is not None:
            best = self._token_ids[best]
        return [best[:size, depth] for depth, size in enumerate(sizes)]
