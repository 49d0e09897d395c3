"""Which probabilities a step verifies drafts with."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.worker.proposals import Proposals

VOCAB = 5
MOST = 3
counts_of_rows = st.dictionaries(st.integers(0, 6), st.integers(0, MOST), min_size=1)


@given(counts_of_rows, st.sets(st.integers(0, 6)), st.randoms(use_true_random=False))
def test_each_draft_has_the_probabilities_it_was_drawn_with(
    counts: dict[int, int], drawn: set[int], chance: Random
) -> None:
    """Whatever rows a step has, in whatever order. Rows without chance have zeros."""
    proposals = Proposals()
    every = torch.rand(7, MOST, VOCAB, generator=torch.Generator().manual_seed(1))
    proposals.keep_probs(np.array([*drawn], np.int32), [every[row] for row in drawn])
    rows = [*counts]
    chance.shuffle(rows)
    found = proposals.probs_of(np.array(rows), np.array([counts[row] for row in rows]))
    if found is None:
        assert not drawn & {*rows}
        return
    expected = [
        every[row, depth] if row in drawn else torch.zeros(VOCAB)
        for row in rows
        for depth in range(counts[row])
    ]
    assert found.tolist() == [each.tolist() for each in expected]
