"""Integers with a scale per group of columns mean the same as Blocks and as floats."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.ops.blocks import Blocks
from pegboard_weights.grouped import block_form, check_whole_groups, column_groups, grouped_rows


@settings(max_examples=80, deadline=None)
@given(
    bits=st.integers(1, 8),
    size=st.sampled_from([8, 16, 32, 64]),
    order=st.sampled_from(["none", "permuted", "unequal"]),
    shift=st.sampled_from(["number", "zeros", "minimum"]),
    seed=st.integers(0, 99),
)
def test_what_the_rows_mean(bits: int, size: int, order: str, shift: str, seed: int) -> None:
    rows = 3
    columns = 128
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns // size)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    scale = torch.rand(shape, generator=generator).half()
    zero: int | Tensor = 2 ** (bits - 1)
    if shift == "zeros":  # GPTQ's first version has zero points up to 2^bits
        zero = torch.randint(0, 2**bits + 1, shape, generator=generator)
    minimum = torch.randn(shape, generator=generator).half() if shift == "minimum" else None
    groups = None if order == "none" else torch.arange(columns) // size
    if groups is not None:
        groups = groups[torch.randperm(columns, generator=generator)]
        if order == "unequal":
            groups[groups == 1] = 0
    found = grouped_rows(codes, bits, scale, zero, size, groups, minimum)
    group = torch.arange(columns) // size if groups is None else groups
    zeros = zero[:, group] if isinstance(zero, Tensor) else zero
    expected = scale.double()[:, group] * (codes.double() - zeros)
    expected += 0 if minimum is None else minimum.double()[:, group]
    fits = size != 8 and order != "unequal"
    assert block_form(columns, size, groups) == ("block_weight" if fits else "float_weight")
    assert isinstance(found, Blocks) == fits
    torch.testing.assert_close(
        found.dense() if isinstance(found, Blocks) else found,
        expected.float(),
        rtol=1e-6,
        atol=2e-5,
    )
    if isinstance(found, Blocks):
        assert found.bits == bits and found.codes.dtype == (
            torch.int8 if bits == 8 else torch.uint8
        )


def piece(name: str, data: Tensor) -> dict[str, WeightPiece]:
    return {
        name: WeightPiece(name, str(data.dtype).removeprefix("torch."), tuple(data.shape), data)
    }


def test_groups_of_columns() -> None:
    assert column_groups({}, "g_idx", 8, 4) is None
    assert column_groups(piece("g_idx", torch.full((8,), -1)), "g_idx", 8, 4) is None
    stored = torch.tensor([1, 0, 0, 0, 1, 1, 1, 0], dtype=torch.int32)
    found = column_groups(piece("g_idx", stored), "g_idx", 8, 4)
    assert found is not None and found.tolist() == stored.tolist()
    for wrong in (-1, 2, 2**31 - 1):
        stored[3] = wrong
        with pytest.raises(ModelError, match="tensor g_idx names groups from .*; there are 0 to 1"):
            column_groups(piece("g_idx", stored), "g_idx", 8, 4)


def test_columns_that_are_not_whole_groups() -> None:
    check_whole_groups("m", 96, 32, "Odd")
    with pytest.raises(ModelError, match="m has 96 columns, which are not groups of 64 .Odd"):
        check_whole_groups("m", 96, 64, "Odd")
