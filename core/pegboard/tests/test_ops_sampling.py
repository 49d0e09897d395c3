"""Compares each op with a definition for one row in numpy. Random draws are checked by chi-square
with fixed seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.ops import sampling as ops
from pegboard_testing.distributions import log_softmax, softmax
from pegboard_testing.sampling_reference import apply_penalties, log_softmax_topk

NEG_INF = float("-inf")
seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=40, deadline=None)


def logits_of(
    rng: np.random.Generator, n: int, vocab_size: int, *, ties: bool = False
) -> np.ndarray:
    x = rng.normal(0, 3, (n, vocab_size)).astype(np.float32)
    return np.round(x) if ties else x


@quick
@given(seeds, st.integers(1, 5), st.integers(1, 40))
def test_penalties(seed: int, n: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    x = logits_of(rng, n, vocab_size)
    in_prompt = rng.random((n, vocab_size)) < 0.3
    counts = rng.integers(0, 3, (n, vocab_size))
    r = rng.uniform(0.5, 2, n)
    f = rng.uniform(-2, 2, n)
    p = rng.uniform(-2, 2, n)
    found = apply_penalties(
        *(torch.tensor(a) for a in (x, in_prompt, counts)),
        *(torch.tensor(a).float() for a in (r, f, p)),
    )
    for i in range(n):
        for t in range(vocab_size):
            value = float(x[i, t])
            if in_prompt[i, t] or counts[i, t]:
                value = value / r[i] if value > 0 else value * r[i]
            value -= f[i] * counts[i, t] + (p[i] if counts[i, t] else 0)
            assert found[i, t].item() == pytest.approx(value, rel=1e-4, abs=1e-4)


@quick
@given(seeds, st.integers(1, 5), st.integers(1, 40))
def test_min_p(seed: int, n: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    x = logits_of(rng, n, vocab_size)
    min_p = rng.uniform(0, 1, n).astype(np.float32) * (rng.random(n) < 0.8)
    found = ops.apply_min_p(torch.tensor(x), torch.tensor(min_p).float())
    probs = softmax(x)
    assert (
        found.tolist()
        == np.where(probs < min_p[:, None] * probs.max(-1, keepdims=True), NEG_INF, x).tolist()
    )


@quick
@given(seeds, st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_top_k_keeps_ties(seed: int, n: int, vocab_size: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    x = logits_of(rng, n, vocab_size, ties=ties)
    top_k = rng.integers(1, vocab_size + 1, n)
    found = ops.apply_top_k_top_p(torch.tensor(x), torch.tensor(top_k), None).numpy()
    for row, k, kept in zip(x, top_k, found, strict=True):
        above = np.array([(row > value).sum() for value in row])
        assert (kept > NEG_INF).tolist() == (above < k).tolist()
        assert (kept[kept > NEG_INF] == row[kept > NEG_INF]).all()


@quick
@given(seeds, st.integers(1, 5), st.integers(1, 40))
def test_top_p_drops_from_the_least_likely_up(seed: int, n: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    x = logits_of(rng, n, vocab_size)
    top_p = rng.uniform(0.01, 1, n).astype(np.float32)
    found = ops.apply_top_k_top_p(torch.tensor(x), None, torch.tensor(top_p)).numpy()
    for row, p, kept in zip(x, top_p, found, strict=True):
        order = np.argsort(row)
        dropped = np.cumsum(softmax(row)[order]) <= 1 - p
        dropped[-1] = False
        assert sorted(order[dropped].tolist()) == np.flatnonzero(kept == NEG_INF).tolist()


def test_top_p_one_and_equal_logits_keep_everything() -> None:
    x = torch.tensor([[0.0, -80.0, -200.0], [1.0, 1.0, 1.0]])
    assert ops.apply_top_k_top_p(x, None, torch.tensor([1.0, 0.4])).isfinite().all()


def test_top_p_looks_at_what_top_k_left() -> None:
    x = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    both = ops.apply_top_k_top_p(x, torch.tensor([2]), torch.tensor([0.55]))
    # 0.4 / 0.7 is over 0.55, 0.4 is not
    assert both.isfinite().tolist() == [[True, False, False, False]]
    assert ops.apply_top_k_top_p(x, None, torch.tensor([0.55])).isfinite().sum() == 2


@quick
@given(seeds, st.integers(1, 4), st.integers(1, 30), st.integers(-1, 40), st.booleans())
def test_log_softmax_topk(seed: int, n: int, vocab_size: int, k: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    x = logits_of(rng, n, vocab_size, ties=ties)
    chosen = rng.integers(0, vocab_size, n)
    ids, values, ranks = log_softmax_topk(torch.tensor(x), torch.tensor(chosen), k)
    for i, row in enumerate(x):
        best = sorted(range(vocab_size), key=lambda t: (-row[t], t))[: vocab_size if k < 0 else k]
        assert ids[i].tolist() == [chosen[i], *best]
        np.testing.assert_allclose(values[i].numpy(), log_softmax(row)[ids[i]], atol=1e-4)
        assert ranks[i].item() == 1 + sum(value > row[chosen[i]] for value in row)
    assert log_softmax_topk(torch.tensor(x), torch.tensor(chosen), 0, normalize=False)[1][
        :, 0
    ].tolist() == [row[t] for row, t in zip(x, chosen, strict=True)]


def test_sample_inverse_covers_each_token_by_its_share() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 5.0, 0.0]])
    uniforms = torch.arange(8, dtype=torch.float64) / 8
    assert ops.sample_inverse(weights.expand(8, -1), uniforms).tolist() == [1, 1, 3, 4, 4, 4, 4, 4]
    assert ops.sample_inverse(
        weights, torch.tensor([1 - 2**-53], dtype=torch.float64)
    ).tolist() == [4]


def test_sample_tokens_draws_where_there_is_a_temperature() -> None:
    """The rows are: greedy; drawn from the two best tokens; with NaN; only −inf. The last two give
    the most likely token."""
    logits = torch.tensor(
        [[0.0, 3.0, 1.0], [2.0, 2.0, 0.0], [0.0, NEG_INF, float("nan")], [NEG_INF] * 3]
    )
    before = logits.clone()
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.0])
    top_k = torch.tensor([3, 2, 3, 3])
    uniforms = torch.tensor([0.9, 0.6, 0.1, 0.5], dtype=torch.float64)
    assert ops.sample_tokens(logits, uniforms, temperature, None, top_k).tolist() == [1, 1, 2, 0]
    assert ops.sample_tokens(logits).tolist() == [1, 0, 2, 0]
    torch.testing.assert_close(logits, before, equal_nan=True)
