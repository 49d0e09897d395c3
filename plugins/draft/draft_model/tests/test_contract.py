"""The proposer of a draft model."""

from __future__ import annotations

from types import SimpleNamespace

from pegboard_draft_draft_model.proposer import ModelProposer

from pegboard.interfaces.draft import DraftSetup, PaddedProposer
from pegboard_testing.contract_draft_model import DraftModelContract


class TestModelProposer(DraftModelContract):
    model = SimpleNamespace()

    def proposer(self, setup: DraftSetup) -> PaddedProposer:
        return ModelProposer(None, setup)
