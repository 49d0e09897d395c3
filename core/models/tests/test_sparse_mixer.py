"""The router against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard_models.sparse_mixer import SparseMixer, sparse_mixer


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 4),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.lists(st.integers(-8, 8), min_size=4, max_size=7, unique=True),
)
def test_sparse_mixing_is_that_of_brute_force(
    top_k: int, jitter: float, eighths: list[int]
) -> None:
    """Each weight is exp(best) over the sum of exp(logit) of those that are left and near."""
    logits = [eighth / 8 for eighth in eighths]
    left = list(range(len(eighths)))
    expected = []
    for _ in range(top_k):
        best = max(left, key=lambda e: logits[e])
        sizes = {e: max(abs(logits[e]), logits[best]) for e in left}
        near = [e for e in left if logits[best] - logits[e] <= 2 * jitter * sizes[e]]
        expected.append((best, 3 * math.exp(logits[best]) / sum(math.exp(logits[e]) for e in near)))
        left.remove(best)
    rule = SparseMixer(top_k, scale=3.0, jitter=jitter)
    weights, ids = sparse_mixer(torch.tensor([logits]), rule)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert ids[0].tolist() == [expert for expert, _ in expected]
    assert weights[0].tolist() == pytest.approx([weight for _, weight in expected], rel=1e-5)
