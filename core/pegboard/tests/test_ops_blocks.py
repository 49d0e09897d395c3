"""The values of a block weight follow from its codes, scales and minima, in every format and in
mixed formats."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.ops import REFERENCES
from pegboard.ops.blocks import Blocks, BlockWeight
from pegboard_testing.held_memory import held_bytes

FORMATS = st.tuples(
    st.integers(1, 8),
    st.sampled_from([16, 32]),
    st.sampled_from([torch.float16, torch.float32]),
    st.booleans(),
)


def random_blocks(
    rows: int,
    columns: int,
    seed: int,
    form: tuple[int, int, torch.dtype, bool] = (4, 32, torch.float16, True),
) -> Blocks:
    """Make random blocks. form: bits, block size, type of the scales, and whether there are
    minima."""
    bits, block_size, dtype, has_minimum = form
    generator = torch.Generator().manual_seed(seed)
    low, high = (-128, 128) if bits == 8 else (0, 2**bits)
    codes = torch.randint(low, high, (rows, columns), generator=generator).to(
        torch.int8 if bits == 8 else torch.uint8
    )
    scale = torch.randn(rows, columns // block_size, generator=generator).to(dtype)
    minimum = (
        torch.randn(rows, columns // block_size, generator=generator).to(dtype)
        if has_minimum
        else None
    )
    return Blocks(
        bits, block_size, codes, scale, minimum, 0 if bits == 8 or has_minimum else high // 2
    )


@settings(max_examples=40, deadline=None)
@given(form=FORMATS, rows=st.integers(1, 5), per_row=st.integers(1, 3), seed=st.integers(0, 99))
def test_values_follow_the_formula(
    form: tuple[int, int, torch.dtype, bool], rows: int, per_row: int, seed: int
) -> None:
    blocks = random_blocks(rows, 32 * per_row, seed, form)
    found = blocks.dense()
    assert found.shape == (rows, 32 * per_row) and found.dtype == torch.float32
    for row in range(rows):
        for column in range(32 * per_row):
            block = column // blocks.block_size
            minimum = 0.0 if blocks.minimum is None else float(blocks.minimum[row, block])
            value = (
                float(blocks.scale[row, block]) * (int(blocks.codes[row, column]) - blocks.zero)
                + minimum
            )
            assert float(found[row, column]) == pytest.approx(value, rel=1e-6, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "has_minimum"), [(torch.int8, False), (torch.int8, True), (torch.uint8, True)]
)
def test_scales_of_two_levels(kind: torch.dtype, has_minimum: bool) -> None:
    """Integers times a float for three of their blocks. A byte may hold a scale and a minimum of
    four bits each."""
    rows = 3
    columns = 192
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (rows, columns), generator=generator).to(torch.uint8)
    low, high = (0, 16) if kind == torch.uint8 else (-128, 128)
    scale, minimum = (
        torch.randint(low, high, (rows, 6), generator=generator).to(kind) for _ in range(2)
    )
    outer = torch.randn(1 + has_minimum, rows, 2, generator=generator).half()
    stored = (
        (scale | minimum << 4, None)
        if kind == torch.uint8
        else (scale, minimum if has_minimum else None)
    )
    found = Blocks(4, 32, codes, *stored, zero=3, outer=outer).dense()
    for row in range(rows):
        for column in range(columns):
            value = (
                float(outer[0, row, column // 96])
                * int(scale[row, column // 32])
                * (int(codes[row, column]) - 3)
            )
            if has_minimum:
                value += float(outer[1, row, column // 96]) * int(minimum[row, column // 32])
            assert float(found[row, column]) == pytest.approx(value, rel=1e-5, abs=1e-3)


@settings(max_examples=30, deadline=None)
@given(
    forms=st.lists(st.tuples(FORMATS, st.integers(1, 40)), min_size=1, max_size=3),
    tokens=st.integers(0, 9),
    gap=st.integers(0, 3),
)
def test_rows_of_different_formats_multiply_as_one_matrix(
    forms: list[tuple[tuple[int, int, torch.dtype, bool], int]], tokens: int, gap: int
) -> None:
    parts = [random_blocks(rows, 96, index, form) for index, (form, rows) in enumerate(forms)]
    expected = torch.cat([*(part.dense() for part in parts), torch.zeros(gap, 96)])
    weight = BlockWeight((len(expected), 96), torch.float32, "cpu")
    assert not weight.restore()
    start = 0
    for part in parts:
        weight.write(start, part)
        start += len(part.codes)
    weight.finish()
    x = torch.randn(tokens, 96, generator=torch.Generator().manual_seed(tokens))
    torch.testing.assert_close(weight.bind()(x), x @ expected.T, rtol=1e-4, atol=2e-2)
    assert torch.equal(weight.dense(), expected)
    assert held_bytes(weight) >= expected.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_is_looked_up_and_multiplied(dtype: torch.dtype) -> None:
    blocks = random_blocks(50, 64, 1)
    weight = BlockWeight((50, 64), dtype, "cpu", is_table=True)
    weight.write(0, blocks)
    weight.finish()
    table = blocks.dense().to(dtype)
    ids = torch.tensor([49, 0, 7, 7])
    x = torch.randn(3, 64).to(dtype)
    assert torch.equal(weight.bind_lookup()(ids), table[ids])
    torch.testing.assert_close(
        weight.bind()(x), x @ table.T, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-3
    )


@pytest.mark.parametrize("is_table", [False, True])
def test_new_rows_reach_callables_already_bound(is_table: bool) -> None:
    old = random_blocks(24, 64, 2)
    new = random_blocks(8, 64, 3)
    weight = BlockWeight((24, 64), torch.float32, "cpu", is_table)
    weight.write(0, old)
    weight.finish()
    call = weight.bind()
    look_up = weight.bind_lookup() if is_table else None
    weight.write(16, new)
    weight.finish()
    expected = torch.cat([old.dense()[:16], new.dense()])
    x = torch.randn(3, 64)
    torch.testing.assert_close(call(x), x @ expected.T, rtol=1e-4, atol=1e-3)
    if look_up is not None:
        assert torch.equal(look_up(torch.arange(24)), expected)


def test_weights_are_ops() -> None:
    """A kernel plugin can replace them like any other op."""
    assert REFERENCES["block_weight"] is BlockWeight
    weight = REFERENCES["float_weight"]((4, 32), torch.float32, "cpu", is_table=True)
    weight.plain().fill_(1.0)
    weight.finish()
    assert torch.equal(weight.bind()(torch.ones(1, 32)), torch.full((1, 4), 32.0))
