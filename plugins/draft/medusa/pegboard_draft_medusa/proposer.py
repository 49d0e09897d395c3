"""The proposer of Medusa heads."""

from __future__ import annotations

from torch import Tensor

from pegboard.interfaces.draft import DraftSetup
from pegboard_drafts.drawing import DraftColumns
from pegboard_drafts.heads import HeadsProposer


class MedusaProposer(HeadsProposer):
    """Implements `pegboard.interfaces.draft.DraftProposer`. Head k proposes the token that is k + 2
    places after the one whose hidden states it reads."""

    def __init__(self, options: None, setup: DraftSetup) -> None:
        super().__init__(setup, self.compute)

    def compute(self, hidden: Tensor, last_ids: Tensor, columns: DraftColumns) -> None:
        """See `pegboard_drafts.heads.Compute`."""
        logits = self.forwards.logits(hidden).unflatten(-1, (self._most_drafts, -1))
        for depth, size in enumerate(columns.sizes):
            columns.add(logits[:size, depth])
