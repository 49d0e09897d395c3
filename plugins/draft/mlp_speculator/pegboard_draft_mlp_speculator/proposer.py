"""The proposer of MLP speculators."""

from __future__ import annotations

from torch import Tensor

from pegboard.interfaces.draft import DraftSetup
from pegboard_drafts.drawing import DraftColumns
from pegboard_drafts.heads import HeadsProposer


class SpeculatorProposer(HeadsProposer):
    """Implements `pegboard.interfaces.draft.DraftProposer`. Each draft token is drawn after those
    before it. Its stages are not recorded."""

    def __init__(self, options: None, setup: DraftSetup) -> None:
        super().__init__(setup, self.compute)

    def compute(self, hidden: Tensor, last_ids: Tensor, columns: DraftColumns) -> None:
        """See `pegboard_drafts.heads.Compute`."""
        model = self.forwards.model
        state = model.begin(hidden)
        token_ids = last_ids
        for stage, size in enumerate(columns.sizes):
            state = model.next(stage, state[:size], token_ids[:size])
            token_ids = columns.add(model.logits_of(stage, state))
