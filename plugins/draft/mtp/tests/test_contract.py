"""The proposer of all methods."""

from __future__ import annotations

from types import SimpleNamespace

from pegboard_draft_mtp.proposer import MTPProposer

from pegboard.interfaces.draft import DraftSetup, PaddedProposer
from pegboard_testing.contract_draft_model import DraftModelContract


class TestMTPProposer(DraftModelContract):
    model = SimpleNamespace(start=lambda hidden: hidden)

    def proposer(self, setup: DraftSetup) -> PaddedProposer:
        return MTPProposer(None, setup)
