"""Routing and the sums of experts under Triton's interpreter, compared with their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pegboard_kernel_triton import mixture
from torch import Tensor

from pegboard.ops import experts
from pegboard.ops.experts import RouterRule
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_invariance import check_rows

pytestmark = [
    pytest.mark.usefixtures("interpreted_triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # where sigmoid is 0
]
SOME = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["route", "sum_experts"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("kernel", f"{name}.triton"))


@SOME
@given(
    size=st.integers(2, 9),
    num_groups=st.sampled_from([1, 1, 3, 4]),
    score=st.sampled_from(["softmax", "sigmoid"]),
    is_corrected=st.booleans(),
    renormalize=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_chosen_experts(
    size: int, num_groups: int, score: Any, is_corrected: bool, renormalize: bool, seed: int
) -> None:
    top_groups = 1 + seed % num_groups
    rule = RouterRule(
        top_k=min(1 + seed % 4, top_groups * size),
        score=score,
        renormalize=renormalize,
        scale=1.0 + seed,
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=1 + seed % 2,
    )
    logits = random(3, num_groups * size, seed=seed)
    correction = random(num_groups * size, seed=seed + 1) if is_corrected else None
    weights, ids = mixture.route(logits, rule, correction)
    expected, expected_ids = experts.route(logits, rule, correction)
    assert torch.equal(ids, expected_ids) and ids.dtype == torch.int32
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # such as ∞ − ∞
def test_equal_and_undefined_logits() -> None:
    """The ids are valid and differ, whatever the logits are."""
    rule = RouterRule(top_k=3)
    logits = torch.zeros(3, 5)
    logits[1, 3:] = float("nan")
    logits[2] = float("-inf")
    _, ids = mixture.route(logits, rule)
    assert ids[0].tolist() == [0, 1, 2]
    assert all(len(set(row)) == 3 and max(row) < 5 for row in ids.tolist())


@SOME
@given(
    width=st.sampled_from([5, 40]),
    each=st.integers(1, 4),
    has_weights=st.booleans(),
    shared=st.sampled_from(["", "plain", "gated"]),
    seed=st.integers(0, 99),
)
def test_sums(width: int, each: int, has_weights: bool, shared: str, seed: int) -> None:
    rows = random(3 * each, width, seed=seed)
    places = torch.randperm(3 * each, generator=torch.Generator().manual_seed(seed)).int()
    places = places.view(3, each)
    places[1, 0] = -1
    given = (
        random(3, each, seed=seed + 1) if has_weights else None,
        random(3, width, seed=seed + 2) if shared else None,
        random(3, 1, seed=seed + 3) if shared == "gated" else None,
    )
    total = mixture.sum_experts(rows, places, *given)
    torch.testing.assert_close(total, experts.sum_experts(rows, places, *given))


def test_no_rows() -> None:
    places = torch.full((2, 3), -1, dtype=torch.int32)
    total = mixture.sum_experts(torch.empty(0, 6), places, torch.ones(2, 3))
    assert torch.equal(total, torch.zeros(2, 6))


def test_rows_have_the_same_bits_in_every_batch() -> None:
    rule = RouterRule(3, "sigmoid", True, num_groups=2, top_groups=1, group_best=2)

    def mix(x: Tensor) -> Tensor:
        weights, ids = mixture.route(x[:, :8], rule)
        rows, places, _ = experts.sort_by_expert(x, ids, 8)
        return mixture.sum_experts(rows, places, weights, x)

    check_rows(mix, random(30, 40, seed=0), (29,))
