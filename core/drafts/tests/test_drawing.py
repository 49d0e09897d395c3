"""Probabilities of drafts that were drawn, in the order of the rows."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pegboard.interfaces.draft import DraftSetup
from pegboard_drafts.drawing import DraftColumns, Drawing
from pegboard_drafts.lengths import DraftLengths
from pegboard_testing.fake_draft import draft_step
from pegboard_testing.fake_limits import fake_limits

VOCAB = 9
LIMITS = fake_limits(max_num_seqs=8, vocab_size=VOCAB, max_drafts=4)


def draw(logits: Tensor, rows: np.ndarray) -> tuple[Tensor, Tensor | None]:
    """Rows with odd numbers are drawn; the token is their number, with a probability that says the
    depth."""
    ids = torch.from_numpy(rows % logits.shape[1])
    if not (rows % 2).any():
        return ids, None
    probs = torch.nn.functional.one_hot(ids, logits.shape[1]) * logits[:, :1]
    return ids, probs * torch.from_numpy(rows % 2)[:, None]


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=8), smaller=st.booleans())
def test_each_draft_has_its_probabilities(counts: list[int], smaller: bool) -> None:
    token_ids = torch.tensor([2, 4, 6, 8, 1, 3, 5]) if smaller else None
    setup = DraftSetup(LIMITS, is_adaptive=False, draw=draw)
    rows = np.arange(len(counts))[::-1].copy()
    columns = DraftColumns(Drawing(setup, token_ids), rows, np.array(counts))
    for depth, size in enumerate(columns.sizes):
        logits = torch.full((size, VOCAB if token_ids is None else len(token_ids)), depth + 1.0)
        columns.add(logits)
    step = draft_step(rows.tolist(), [[0]] * len(rows), counts)
    drafts = columns.drafts(step, DraftLengths(setup))
    assert [len(ids) for ids in drafts.token_ids] == counts
    flat = [int(token) for ids in drafts.token_ids for token in ids]
    owners = np.repeat(rows, counts)
    names = owners % (VOCAB if token_ids is None else len(token_ids))
    assert flat == (names if token_ids is None else token_ids[names]).tolist()
    depths = np.concatenate([np.arange(count) + 1 for count in counts])
    if drafts.probs is None:
        assert not (owners % 2).any()
        return
    assert drafts.probs.shape == (sum(counts), VOCAB)
    expected = torch.zeros(sum(counts), VOCAB)
    expected[range(sum(counts)), flat] = torch.from_numpy(depths * (owners % 2)).float()
    assert torch.equal(drafts.probs, expected)


@given(num_rows=st.integers(1, 8), depths=st.integers(1, 4))
def test_padded_drafts_are_the_same(num_rows: int, depths: int) -> None:
    setup = DraftSetup(LIMITS, is_adaptive=False, draw=draw)
    rows = np.arange(num_rows)[::-1].copy()
    counts = [depths] * num_rows
    columns = DraftColumns(Drawing(setup), rows, np.array(counts))
    for depth in range(depths):
        columns.add(torch.full((num_rows, VOCAB), depth + 1.0))
    ids, probs = columns.padded()
    step = draft_step(rows.tolist(), [[0]] * num_rows, counts)
    drafts = columns.drafts(step, DraftLengths(setup))
    assert ids.tolist() == [each.tolist() for each in drafts.token_ids]
    assert (probs is None) == (drafts.probs is None)
    if probs is not None and drafts.probs is not None:
        assert torch.equal(probs.flatten(0, 1), drafts.probs)
