"""The products of adapters against the op's reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kernel_cpu.lora import expert_adapter_rows, lora_add

from pegboard import ops
from pegboard.ops import AdapterExchange
from pegboard_testing.fake_build import adapter_rows

RANKS = [20, 3, 0, 16, 17]
COLUMNS = 70
MAX_RANK = 20
WIDTH = 32


@pytest.mark.parametrize("is_lookup", [False, True])
@pytest.mark.parametrize("bounds", [(0, 40), (0, 64, 96, 133)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_mix_of_adapters(dtype: torch.dtype, bounds: tuple[int, ...], is_lookup: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = len(bounds) - 1
    a = torch.zeros(len(RANKS), COLUMNS, parts, WIDTH, dtype=dtype)
    b = torch.zeros(len(RANKS), MAX_RANK, bounds[-1], dtype=dtype)
    for slot, rank in enumerate(RANKS):
        a[slot, :, :, :rank] = torch.randn(COLUMNS, parts, rank, generator=generator)
        b[slot, :rank] = torch.randn(rank, bounds[-1], generator=generator)
    matrices = a.flatten(2), b, torch.tensor(RANKS, dtype=torch.int32), bounds
    for num_rows in (1, 5, 33, 100):
        slots = torch.randint(0, len(RANKS) + 1, (num_rows,), generator=generator).tolist()
        rows = adapter_rows(slots, len(RANKS))
        x = (
            torch.randint(0, COLUMNS, (num_rows,))
            if is_lookup
            else torch.randn(num_rows, COLUMNS, generator=generator)
        )
        y = torch.randn(num_rows, bounds[-1], generator=generator)
        found = lora_add(y.clone(), x, *matrices, rows)
        torch.testing.assert_close(
            found, ops.lora_add(y.clone(), x, *matrices, rows), atol=1e-4, rtol=1e-4
        )
        for i in range(num_rows):
            alone = lora_add(
                y[i : i + 1].clone(),
                x[i : i + 1],
                *matrices,
                adapter_rows(slots[i : i + 1], len(RANKS)),
            )
            assert torch.equal(found[i : i + 1], alone), "a row gets the same bits in every batch"


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([(0, 40), (0, 64, 96, 133), (0, 7, 8)]),
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(0, 99),
)
def test_products_that_ranks_exchange(
    turns: int, max_rank: int, bounds: tuple[int, ...], slots: list[int], seed: int
) -> None:
    """Each member has some ranks of every adapter. What nobody reads may be anything."""
    generator = torch.Generator().manual_seed(seed)
    parts = len(bounds) - 1
    held = -(-max_rank // turns)
    columns = -(-held * parts // WIDTH) * WIDTH
    firsts = [part * held for part in range(parts)]
    ranks = torch.randint(0, max_rank + 1, (3,), generator=generator, dtype=torch.int32)
    whole = torch.randn(3, COLUMNS, parts, max_rank, generator=generator)
    b = torch.randn(3, max_rank, bounds[-1], generator=generator)
    for slot, rank in enumerate(ranks.tolist()):
        whole[slot, :, :, rank:] = 0
        b[slot, rank:] = 0
    own = torch.zeros(turns, 3, COLUMNS, columns)
    own_columns = torch.zeros(turns, 3, dtype=torch.int32)
    for turn in range(turns):
        for slot, rank in enumerate(ranks.tolist()):
            if count := len(range(turn, rank, turns)):
                own_columns[turn, slot] = firsts[-1] + count
            for first, matrix in zip(firsts, whole[slot].unbind(1), strict=True):
                own[turn, slot, :, first : first + count] = matrix[:, turn:rank:turns]
    rows = adapter_rows(slots, 3)
    x = torch.randn(len(slots), COLUMNS, generator=generator)
    y = torch.randn(len(slots), bounds[-1] + 3, generator=generator)
    sent: list[torch.Tensor] = []

    def call(turn: int, to: torch.Tensor) -> torch.Tensor:
        """Compute as this member, after those before it have."""

        def run(part: torch.Tensor) -> torch.Tensor:
            sent.append(part)
            nobody = [torch.full_like(part, torch.nan)] * (turns - len(sent))
            return torch.cat([*sent, *nobody], 1)

        exchange = AdapterExchange(run, turns, firsts, own_columns[turn])
        lora_add(to[:, 1:-2], x, own[turn], b, ranks, bounds, rows, exchange)
        return to

    for turn in range(turns):
        found = call(turn, y.clone())
    expected = y.clone()
    ops.lora_add(expected[:, 1:-2], x, whole.flatten(2), b, ranks, bounds, rows)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), st.integers(1, 40), st.integers(0, 99)
)
def test_rows_of_experts(
    num_slots: int, num_experts: int, top_k: int, num_tokens: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = adapter_rows(
        torch.randint(0, num_slots + 1, (num_tokens,), generator=generator).tolist(), num_slots
    )
    held = torch.randperm(num_experts + 2, generator=generator).int() - 2
    held.clamp_(min=-1)  # two experts are elsewhere
    ids = torch.randint(0, len(held), (num_tokens, top_k), generator=generator, dtype=torch.int32)
    nothing = torch.zeros(num_tokens, 1)
    _, places, starts = ops.sort_by_expert(nothing, ids, num_experts, None, held)
    found, expected = (
        op(rows, places, starts) for op in (expert_adapter_rows, ops.expert_adapter_rows)
    )
    assert torch.equal(found.starts, expected.starts)
    for first, last in zip(expected.starts, expected.starts[1:], strict=False):
        assert torch.equal(*(rows.order[first:last].sort().values for rows in (found, expected)))
    for token in range(num_tokens):
        for choice in range(top_k):
            if places[token, choice] < 0:
                continue
            slot = next(
                s
                for s in range(num_slots + 1)
                if token in rows.order[rows.starts[s] : rows.starts[s + 1]]
            )
            own = 0 if slot == 0 else 1 + (slot - 1) * num_experts + int(held[ids[token, choice]])
            assert (
                places[token, choice]
                in expected.order[expected.starts[own] : expected.starts[own + 1]]
            )
