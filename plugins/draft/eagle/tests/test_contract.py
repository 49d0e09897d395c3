"""The proposer of heads."""

from __future__ import annotations

from types import SimpleNamespace

from pegboard_draft_eagle.proposer import EagleProposer

from pegboard.interfaces.draft import DraftSetup, PaddedProposer
from pegboard_testing.contract_draft_model import DraftModelContract


class TestEagleProposer(DraftModelContract):
    model = SimpleNamespace(start=lambda hidden: hidden)

    def proposer(self, setup: DraftSetup) -> PaddedProposer:
        return EagleProposer(None, setup)
