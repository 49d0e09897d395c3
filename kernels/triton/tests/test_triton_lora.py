"""The products of adapters under Triton's interpreter, compared with the op's reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pegboard_kernel_triton import lora

from pegboard import ops
from pegboard.ops import AdapterExchange
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_build import adapter_rows

pytestmark = pytest.mark.usefixtures("interpreted_triton")
SOME = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-1}
Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def matrices_of(
    ranks: list[int], columns: int, width: int, bounds: tuple[int, ...], dtype: torch.dtype
) -> Matrices:
    """Return A, B and the ranks of random adapters."""
    generator = torch.Generator().manual_seed(len(ranks) + columns)
    parts = len(bounds) - 1
    a = torch.zeros(len(ranks), columns, parts, width, dtype=dtype)
    b = torch.zeros(len(ranks), max(*ranks, 1), bounds[-1], dtype=dtype)
    for slot, rank in enumerate(ranks):
        a[slot, :, :, :rank] = torch.randn(columns, parts, rank, generator=generator)
        a[slot] /= columns**0.5
        b[slot, :rank] = torch.randn(rank, bounds[-1], generator=generator)
    return a.flatten(2), b, torch.tensor(ranks, dtype=torch.int32)


def test_contract() -> None:
    check_entry(installed_entry("kernel", "lora_add.triton"))


@SOME
@given(
    st.lists(st.sampled_from([0, 1, 3, 16, 20]), min_size=1, max_size=4),
    st.lists(st.integers(0, 4), max_size=40),
    st.sampled_from([(0, 40), (0, 7, 7, 140), (0, 1, 2, 3, 4, 5, 6)]),
    st.sampled_from([5, 70]),
    st.booleans(),
    st.sampled_from(list(TOLERANCES)),
    st.sampled_from([None, torch.bfloat16]),
    st.integers(0, 99),
)
def test_any_mix_of_adapters(
    ranks: list[int],
    slots: list[int],
    bounds: tuple[int, ...],
    columns: int,
    is_lookup: bool,
    dtype: torch.dtype,
    stored: torch.dtype | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b, all_ranks = matrices_of(ranks, columns, 32, bounds, stored or dtype)
    rows = adapter_rows([min(slot, len(ranks)) for slot in slots], len(ranks))
    rest = torch.tensor([99, -7], dtype=torch.int32)
    rows = rows._replace(order=torch.cat((rows.order, rest)))
    count = len(slots) + 2  # the last rows are padding
    x = (
        torch.randint(0, columns, (count,), generator=generator)
        if is_lookup
        else torch.randn(count, columns + 3, generator=generator).to(dtype)[:, 1:-2]
    )
    y = torch.randn(count, bounds[-1] + 2, generator=generator).to(dtype)
    expected = y.clone()
    ops.lora_add(expected[:, 1:-1], x, a, b, all_ranks, bounds, rows)
    part = y[:, 1:-1]
    assert lora.lora_add(part, x, a, b, all_ranks, bounds, rows) is part
    allowed = TOLERANCES[dtype]
    torch.testing.assert_close(y, expected, atol=allowed, rtol=allowed)


def test_a_row_gets_the_same_bits_in_every_batch() -> None:
    """Long rows are multiplied in several parts."""
    ranks = [20, 3]
    bounds = (0, 8, 20)
    matrices = matrices_of(ranks, 1100, 32, bounds, torch.float32)
    x = torch.randn(3, 1100)
    y = torch.randn(3, 20)
    slots = [1, 2, 1]
    found = lora.lora_add(y.clone(), x, *matrices, bounds, adapter_rows(slots, 2))
    expected = ops.lora_add(y.clone(), x, *matrices, bounds, adapter_rows(slots, 2))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for i in range(3):
        rows = adapter_rows(slots[i : i + 1], 2)
        alone = lora.lora_add(y[i : i + 1].clone(), x[i : i + 1], *matrices, bounds, rows)
        assert torch.equal(alone, found[i : i + 1])


def test_what_ranks_exchange_is_computed_by_the_reference() -> None:
    a, b, ranks = matrices_of([3], 6, 16, (0, 4), torch.float32)
    x = torch.randn(2, 6)
    exchange = AdapterExchange(lambda part: 2 * part, 1, (0,), ranks)
    rows = adapter_rows([1, 0], 1)
    found = lora.lora_add(torch.zeros(2, 4), x, a, b, ranks, (0, 4), rows, exchange)
    expected = ops.lora_add(torch.zeros(2, 4), 2 * x, a, b, ranks, (0, 4), rows)
    torch.testing.assert_close(found, expected)
