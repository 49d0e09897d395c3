"""The proposer of Medusa heads."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from pegboard_draft_medusa.proposer import MedusaProposer
from torch import Tensor

from pegboard.interfaces.draft import DraftSetup, PaddedProposer
from pegboard_testing.contract_draft_model import MAX_DRAFTS, VOCAB_SIZE, DraftModelContract


def logits(hidden: Tensor) -> Tensor:
    """The head number k says the state plus k."""
    ids = (hidden.long() + torch.arange(MAX_DRAFTS)) % VOCAB_SIZE
    return torch.nn.functional.one_hot(ids, VOCAB_SIZE).flatten(1)


class TestMedusaProposer(DraftModelContract):
    model = SimpleNamespace(most_drafts=MAX_DRAFTS)
    logits = logits

    def proposer(self, setup: DraftSetup) -> PaddedProposer:
        return MedusaProposer(None, setup)
