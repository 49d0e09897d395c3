"""The proposer of all methods."""

from __future__ import annotations

from pegboard.interfaces.draft import DraftSetup
from pegboard_drafts.chain import ChainProposer, FollowStates


class MTPProposer(ChainProposer):
    """Implements `pegboard.interfaces.draft.DraftProposer`."""

    def __init__(self, options: None, setup: DraftSetup) -> None:
        super().__init__(setup, FollowStates(setup))
