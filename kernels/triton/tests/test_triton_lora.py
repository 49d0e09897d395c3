"""The products of adapters under Triton's interpreter, compared with the op's reference."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pegboard_kernel_triton import lora

from pegboard import ops
from pegboard.ops import AdapterExchange, AdapterRows
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_build import adapter_rows
from pegboard_testing.fake_gpu import DEVICE, FakeGPU, FakeReplay
from pegboard_testing.fake_triton import triton_on_fake_gpu

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


class Members:
    """Ranks that have the ranks of every adapter in turn. own: the products of each member's A and
    x, so far. The last one computes with those of all."""

    def __init__(
        self,
        turns: int,
        ranks: list[int],
        columns: int,
        bounds: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        parts = len(bounds) - 1
        most = max(*ranks, 1)
        self.turns = turns
        self.whole, self.b, self.ranks = matrices_of(ranks, columns, most, bounds, dtype)
        held = -(-most // turns)
        self.firsts = [part * held for part in range(parts)]
        width = -(-held * parts // 16) * 16
        self.a = torch.zeros(turns, len(ranks), columns, width, dtype=dtype)
        self.columns = torch.zeros(turns, len(ranks), dtype=torch.int32)
        each = self.whole.unflatten(2, (parts, most))
        for turn, slot in product(range(turns), range(len(ranks))):
            count = len(range(turn, ranks[slot], turns))
            self.columns[turn, slot] = self.firsts[-1] + count if count else 0
            for first, part in zip(self.firsts, each[slot].unbind(1), strict=True):
                self.a[turn, slot, :, first : first + count] = part[:, turn : ranks[slot] : turns]
        self.own: list[torch.Tensor] = []

    def exchange(self, turn: int) -> AdapterExchange:
        def run(part: torch.Tensor) -> torch.Tensor:
            assert part.isfinite().all()
            self.own.append(part)
            nobody = [torch.full_like(part, torch.nan)] * (self.turns - len(self.own))
            return torch.cat([*self.own, *nobody], 1)

        return AdapterExchange(run, self.turns, self.firsts, self.columns[turn])


@SOME
@given(
    st.integers(1, 3),
    st.lists(st.sampled_from([0, 1, 3, 16, 20]), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
    st.sampled_from([(0, 40), (0, 7, 7, 140), (0, 1, 2, 3, 4, 5, 6)]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)
def test_ranks_that_divide_the_ranks_of_adapters(
    turns: int,
    ranks: list[int],
    slots: list[int],
    bounds: tuple[int, ...],
    is_lookup: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    members = Members(turns, ranks, 70, bounds, dtype)
    rows = adapter_rows([min(slot, len(ranks)) for slot in slots], len(ranks))
    x = (
        torch.randint(0, 70, (len(slots),), generator=generator)
        if is_lookup
        else torch.randn(len(slots), 70, generator=generator).to(dtype)
    )
    y = torch.randn(len(slots), bounds[-1] + 2, generator=generator).to(dtype)
    expected = y.clone()
    ops.lora_add(expected[:, 1:-1], x, members.whole, members.b, members.ranks, bounds, rows)
    for turn in range(turns):
        part = y.clone()
        given = (members.a[turn], members.b, members.ranks, bounds, rows, members.exchange(turn))
        lora.lora_add(part[:, 1:-1], x, *given)
    allowed = TOLERANCES[dtype]
    torch.testing.assert_close(part, expected, atol=allowed, rtol=allowed)


def test_ranks_that_divide_columns_add_up() -> None:
    """Long rows, whose products are made in several parts."""
    a, b, ranks = matrices_of([3], 1100, 16, (0, 4), torch.float32)
    x = torch.randn(2, 1100)
    exchange = AdapterExchange(lambda part: 2 * part, 1, (0,), ranks)
    rows = adapter_rows([1, 0], 1)
    found = lora.lora_add(torch.zeros(2, 4), x, a, b, ranks, (0, 4), rows, exchange)
    expected = ops.lora_add(torch.zeros(2, 4), 2 * x, a, b, ranks, (0, 4), rows)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_an_exchange_is_captured() -> None:
    """Nothing is read on the host. A replay serves other rows and adapters."""
    bounds = (0, 4, 9)
    a, b, ranks = matrices_of([3, 2], 20, 16, bounds, torch.float32)
    x = torch.randn(3, 20)
    with FakeGPU() as gpu, triton_on_fake_gpu():
        x_there = x.to(DEVICE)
        matrices = a.to(DEVICE), b.to(DEVICE), ranks.to(DEVICE)
        columns = torch.tensor([19, 18], dtype=torch.int32).to(DEVICE)
        exchange = AdapterExchange(lambda part: part + part, 1, (0, 16), columns)
        rows = AdapterRows(*(each.to(DEVICE) for each in adapter_rows([1, 1, 2], 2)))
        y = torch.zeros(3, 9, device=DEVICE)

        def run(x: torch.Tensor) -> tuple[torch.Tensor]:
            return (lora.lora_add(y.zero_(), x, *matrices, bounds, rows, exchange),)

        recording = FakeReplay().record(run, [x_there])
        for slots in ([2, 0, 1], [1, 1, 1]):
            now = adapter_rows(slots, 2)
            rows.order.copy_(now.order.to(DEVICE))
            rows.starts.copy_(now.starts.to(DEVICE))
            reads = gpu.host_reads
            (result,) = recording(3)
            assert gpu.host_reads == reads
            expected = ops.lora_add(torch.zeros(3, 9), 2 * x, a, b, ranks, bounds, now)
            torch.testing.assert_close(result.cpu(), expected, atol=1e-4, rtol=1e-4)
