"""The kernel samples the same tokens as `pegboard.ops.sampling.sample_tokens`, except where cumulative weights round
differently."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kernel_cpu.sampling import sample_tokens
from torch import Tensor

from pegboard.ops import sampling as reference

pytestmark = pytest.mark.usefixtures("native")

ROUNDING = 2e-6


def _kept(logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    x = reference.apply_min_p(logits / temperature.unsqueeze(-1), min_p)
    return reference.apply_top_k_top_p(x, top_k, top_p).double().softmax(-1)


@settings(max_examples=60)
@given(st.integers(1, 5), st.sampled_from([1, 2, 63, 64, 65, 1000, 5003]), st.sampled_from([0.01, 1, 6, 30]), st.booleans(),
       st.integers(0, 2**20))  # fmt: skip
def test_draws_are_of_the_reference(num_rows: int, vocabulary: int, spread: float, has_ties: bool, seed: int) -> None:
    """Check that the reference also keeps the sampled token, and that the token's share of the cumulative weight contains the
    uniform."""
    random = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=random)

    logits = torch.randn(num_rows, vocabulary, generator=random) * spread
    if has_ties:
        logits = logits.round()
    logits[uniform(num_rows, vocabulary) < 0.2] = float("-inf")
    logits[:, 0] = 0
    temperature, top_k = uniform(num_rows) + 0.1, torch.randint(1, vocabulary + 1, (num_rows,), generator=random)
    min_p = torch.where(uniform(num_rows) < 0.5, 0, uniform(num_rows) * 0.3)
    top_p = torch.where(uniform(num_rows) < 0.3, 1, uniform(num_rows) * 0.98 + 0.01)
    top_k[uniform(num_rows) < 0.3] = vocabulary
    uniforms = torch.rand(num_rows, generator=random, dtype=torch.float64)
    before = logits.clone()
    ids = sample_tokens(logits, uniforms, temperature, min_p, top_k, top_p)
    assert torch.equal(logits, before) and ids.dtype == torch.int64
    probs = _kept(logits, temperature, min_p, top_k, top_p)
    wider = _kept(logits, temperature, min_p * (1 - 1e-5), top_k, (top_p + ROUNDING).clamp(max=1))
    narrower = _kept(logits, temperature, min_p * (1 + 1e-5), top_k, top_p - ROUNDING)
    if torch.equal(wider, narrower):  # otherwise rounding decides which side of a cut a token is on
        until = probs.cumsum(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        own = probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        assert (own > 0).all()
        assert (until - own - ROUNDING <= uniforms).all() and (uniforms <= until + ROUNDING).all()


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 3000), st.integers(0, 2**20))
def test_most_likely_tokens(num_rows: int, vocabulary: int, seed: int) -> None:
    """argmax takes the first of equal maxima and treats NaN as the largest value. Some rows have infinities, and some have only
    −inf."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 3, (num_rows, vocabulary), generator=random).float()
    for value in ("nan", "inf", "-inf"):
        where = torch.randint(0, num_rows, (1,), generator=random)
        logits[where, torch.randint(0, vocabulary, (1,), generator=random)] = float(value)
    logits[-1] = float("-inf")
    expected = reference.sample_tokens(logits)
    assert torch.equal(sample_tokens(logits), expected)
    zeros = torch.zeros(num_rows)
    assert torch.equal(sample_tokens(logits, zeros.double(), zeros), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_cannot_be_drawn_from_give_their_maximum(value: float) -> None:
    logits = torch.randn(3, 200)
    logits[1, 77] = value
    ones = torch.ones(3)
    found = sample_tokens(logits, torch.full((3,), 0.5, dtype=torch.float64), ones, None, None, ones * 0.9)
    assert found[1] == 77 == reference.sample_tokens(logits, torch.full((3,), 0.5, dtype=torch.float64), ones)[1]


def test_columns_of_a_wider_buffer() -> None:
    """The rows of a view have the view's stride."""
    logits = torch.randn(4, 300)[:, 20:280]
    assert torch.equal(sample_tokens(logits), logits.argmax(-1))
