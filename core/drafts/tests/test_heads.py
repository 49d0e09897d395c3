"""Which rows get drafts of heads, from which hidden states, and how many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.draft import ComputedTokens, DraftSetup, DraftStep
from pegboard_drafts.drawing import DraftColumns
from pegboard_drafts.heads import HeadsProposer
from pegboard_testing.fake_limits import fake_limits


class Echo(HeadsProposer):
    """Proposes 100 · depth + 10 · the last token + the hidden state. It keeps what it was given."""

    def __init__(self, setup: DraftSetup) -> None:
        super().__init__(setup, self.compute)

    def compute(self, hidden: Tensor, last_ids: Tensor, columns: DraftColumns) -> None:
        self.sizes = columns.sizes
        ids = 10 * last_ids + hidden[:, 0].long()
        for depth, size in enumerate(columns.sizes):
            columns.add(torch.nn.functional.one_hot(100 * depth + ids[:size], 512).float())


def echo(most_drafts: int = 3) -> Echo:
    forwards: Any = SimpleNamespace(model=SimpleNamespace(most_drafts=most_drafts))
    limits = fake_limits(max_num_seqs=4, vocab_size=64, max_drafts=5)
    return Echo(DraftSetup(limits, is_adaptive=False, forwards=forwards))


def step(limits: list[int], samples: list[bool], counts: list[int]) -> DraftStep:
    """A step whose hidden states are the places 0, 1, 2 … of its tokens. The last token of the
    history of row i is i + 1."""
    rows = np.flatnonzero(samples)
    return DraftStep(
        rows=rows,
        history=[np.array([9, row + 1], np.int32) for row in rows],
        max_drafts=np.array(limits),
        num_verified=np.zeros(len(rows), np.int64),
        num_new=np.ones(len(rows), np.int64),
        computed=ComputedTokens(
            rows=np.arange(len(samples)),
            starts=np.zeros(len(samples), np.int64),
            counts=np.array(counts),
            samples=np.array(samples),
            hidden=(torch.arange(float(sum(counts)))[:, None],),
        ),
    )


def test_each_row_gets_its_number() -> None:
    """The states are those at the last token of each row that has sampled."""
    proposer = echo()
    drafts = proposer.propose(step([1, 5, 0], [True, False, True, True], [2, 1, 3, 1]))
    assert [ids.tolist() for ids in drafts.token_ids] == [[11], [35, 135, 235], []]
    assert all(ids.dtype == np.int32 for ids in drafts.token_ids)
    assert proposer.sizes == [2, 1, 1]


def test_steps_without_drafts() -> None:
    assert echo().propose(step([], [False, False], [2, 3])).token_ids == []
    assert [len(ids) for ids in echo().propose(step([0], [True], [2])).token_ids] == [0]


def test_never_more_than_the_model_has() -> None:
    (ids,) = echo(most_drafts=2).propose(step([5], [True], [1])).token_ids
    assert ids.tolist() == [10, 110]
