"""Contract tests of kernels for the op `sample_tokens`. A plugin's test file:

    class TestMySampling(SampleTokensContract):
        @staticmethod
        def sample(*arguments: Tensor | None) -> Tensor:
            return my_sample_tokens(*arguments)

The kernel samples the same tokens as `pegboard.ops.sampling.sample_tokens`, except where cumulative
weights round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard.ops import sampling as reference

ROUNDING = 2e-6
SIZES = (1, 2, 63, 64, 65, 1000, 5003)


def one_of(random: torch.Generator, values: Sequence[Any]) -> Any:
    """Return one of the values, at random."""
    return values[int(torch.randint(len(values), (1,), generator=random))]


def _kept(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    x = reference.apply_min_p(logits / temperature.unsqueeze(-1), min_p)
    return reference.apply_top_k_top_p(x, top_k, top_p).double().softmax(-1)


class SampleTokensContract:
    """Every kernel for `sample_tokens` passes these. Override `sample`. examples: how many random
    batches a test draws."""

    examples = 50

    @staticmethod
    def sample(*arguments: Tensor | None) -> Tensor:
        """Return what the kernel returns."""
        raise AssertionError("override SampleTokensContract.sample")

    def test_draws_are_of_the_reference(self) -> None:
        """Check that the reference also keeps the sampled token, and that the token's share of the
        cumulative weight contains the uniform."""
        for seed in range(self.examples):
            self.check_draws(torch.Generator().manual_seed(seed))

    def check_draws(self, random: torch.Generator) -> None:
        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=random)

        num_rows = one_of(random, range(1, 6))
        vocabulary = one_of(random, SIZES)
        spread = one_of(random, (0.01, 1, 6, 30))
        logits = torch.randn(num_rows, vocabulary, generator=random) * spread
        if one_of(random, (False, True)):
            logits = logits.round()
        logits[uniform(num_rows, vocabulary) < 0.2] = float("-inf")
        logits[:, 0] = 0
        temperature = uniform(num_rows) + 0.1
        top_k = torch.randint(1, vocabulary + 1, (num_rows,), generator=random)
        min_p = torch.where(uniform(num_rows) < 0.5, 0, uniform(num_rows) * 0.3)
        top_p = torch.where(uniform(num_rows) < 0.3, 1, uniform(num_rows) * 0.98 + 0.01)
        top_k[uniform(num_rows) < 0.3] = vocabulary
        uniforms = torch.rand(num_rows, generator=random, dtype=torch.float64)
        before = logits.clone()
        ids = self.sample(logits, uniforms, temperature, min_p, top_k, top_p)
        assert torch.equal(logits, before) and ids.dtype == torch.int64
        probs = _kept(logits, temperature, min_p, top_k, top_p)
        wider = _kept(
            logits, temperature, min_p * (1 - 1e-5), top_k, (top_p + ROUNDING).clamp(max=1)
        )
        narrower = _kept(logits, temperature, min_p * (1 + 1e-5), top_k, top_p - ROUNDING)
        # otherwise rounding decides which side of a cut a token is on
        if torch.equal(wider, narrower):
            until = probs.cumsum(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            share = probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            assert (share > 0).all()
            assert (until - share - ROUNDING <= uniforms).all() and (
                uniforms <= until + ROUNDING
            ).all()

    def test_most_likely_tokens(self) -> None:
        """argmax takes the first of equal maxima and treats NaN as the largest value. Some rows
        have infinities, and some have only −inf."""
        for seed in range(self.examples):
            self.check_most_likely(torch.Generator().manual_seed(seed))

    def check_most_likely(self, random: torch.Generator) -> None:
        num_rows = one_of(random, range(1, 41))
        vocabulary = one_of(random, range(1, 3001))
        logits = torch.randint(-3, 3, (num_rows, vocabulary), generator=random).float()
        for value in ("nan", "inf", "-inf"):
            where = torch.randint(0, num_rows, (1,), generator=random)
            logits[where, torch.randint(0, vocabulary, (1,), generator=random)] = float(value)
        logits[-1] = float("-inf")
        expected = reference.sample_tokens(logits)
        assert torch.equal(self.sample(logits), expected)
        zeros = torch.zeros(num_rows)
        assert torch.equal(self.sample(logits, zeros.double(), zeros), expected)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_rows_that_cannot_be_drawn_from_give_their_maximum(self, value: float) -> None:
        logits = torch.randn(3, 200)
        logits[1, 77] = value
        ones = torch.ones(3)
        ids = self.sample(
            logits, torch.full((3,), 0.5, dtype=torch.float64), ones, None, None, ones * 0.9
        )
        assert (
            ids[1]
            == 77
            == reference.sample_tokens(logits, torch.full((3,), 0.5, dtype=torch.float64), ones)[1]
        )

    def test_columns_of_a_wider_buffer(self) -> None:
        """The rows of a view have the view's stride."""
        logits = torch.randn(4, 300)[:, 20:280]
        assert torch.equal(self.sample(logits), logits.argmax(-1))
