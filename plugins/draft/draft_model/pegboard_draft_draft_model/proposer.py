"""The proposer of a model that reads only tokens."""

from __future__ import annotations

from pegboard.interfaces.draft import DraftSetup
from pegboard_drafts.chain import ChainProposer, FollowTokens


class ModelProposer(ChainProposer):
    """Implements `pegboard.interfaces.draft.DraftProposer`."""

    def __init__(self, options: None, setup: DraftSetup) -> None:
        super().__init__(setup, FollowTokens(setup))
