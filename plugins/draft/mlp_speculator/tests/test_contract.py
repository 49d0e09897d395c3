"""The proposer of MLP speculators."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from pegboard_draft_mlp_speculator.proposer import SpeculatorProposer
from torch import Tensor

from pegboard.interfaces.draft import DraftSetup, PaddedProposer
from pegboard_testing.contract_draft_model import MAX_DRAFTS, VOCAB_SIZE, DraftModelContract


def after(stage: int, state: Tensor, token_ids: Tensor) -> Tensor:
    """A state that depends on the token, the state before it and the stage."""
    return (31 * state + 7 * token_ids.unsqueeze(1) + stage) % 10_007


def logits_of(stage: int, state: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(state[:, 0].long() % VOCAB_SIZE, VOCAB_SIZE)


class TestSpeculatorProposer(DraftModelContract):
    model = SimpleNamespace(
        most_drafts=MAX_DRAFTS, begin=lambda hidden: hidden, next=after, logits_of=logits_of
    )

    def proposer(self, setup: DraftSetup) -> PaddedProposer:
        return SpeculatorProposer(None, setup)
