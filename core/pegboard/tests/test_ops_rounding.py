"""Activations that are rounded as a checkpoint asks, and what the references multiply."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.ops.blocks import Blocks, BlockWeight
from pegboard.ops.rounding import LARGEST, Rounding


@given(
    st.sampled_from(sorted(LARGEST)),
    st.sampled_from((0, 32, 48)),
    st.integers(1, 4),
    st.integers(1, 130),
    st.integers(0, 99),
)
def test_codes_are_the_nearest_ones(
    kind: str, group: int, count: int, columns: int, seed: int
) -> None:
    """Each group of columns has the smallest scale with which its numbers fit."""
    x = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed)) * 10
    rounding = Rounding(kind, group)
    codes, scales, _ = rounding.quantize(x)
    assert codes.dtype == getattr(torch, kind) and codes.shape == x.shape
    width = group or columns
    for start in range(0, columns, width):
        part = x[:, start : start + width]
        scale = part.abs().amax(1) / LARGEST[kind]
        assert torch.equal(scales[:, start // width], scale)
        step = scale.unsqueeze(1) if kind == "int8" else part.abs() / 8
        error = (rounding.rounded(x)[:, start : start + width] - part).abs()
        assert bool((error <= step * 0.51 + scale.unsqueeze(1) * 2**-9).all())


def test_static_scales_and_zeros() -> None:
    x = torch.tensor([[0.0, 0.0], [300.0, -0.4]])
    codes, scales, _ = Rounding("int8", scale=0.5).quantize(x)
    assert codes.tolist() == [[0, 0], [127, -1]] and scales.tolist() == [[0.5], [0.5]]
    codes, scales, _ = Rounding("int8").quantize(x)
    assert codes.tolist() == [[0, 0], [127, 0]] and scales[0].item() == 1


@pytest.mark.parametrize("kind", sorted(LARGEST))
def test_references_multiply_what_the_codes_stand_for(kind: str) -> None:
    """All of them, also experts. They are not faster than without."""
    rounding = Rounding(kind)
    weight = BlockWeight((6, 32), torch.float32, "cpu", rounding=rounding)
    codes = torch.randint(-128, 128, (6, 32), dtype=torch.int8)
    weight.write(0, Blocks(8, 32, codes, torch.rand(6, 1)))
    weight.finish()
    x = torch.randn(3, 32)
    expected = rounding.rounded(x) @ weight.dense().T
    torch.testing.assert_close(weight.bind()(x), expected)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    products = weight.bind_experts(2, None)(x, starts)
    torch.testing.assert_close(products[:1], expected[:1, :3])
    torch.testing.assert_close(products[1:], expected[1:, 3:])
    assert weight.takes(rounding, False) and not weight.takes(rounding, True)


def test_zero_points_spread_all_codes() -> None:
    """From the least to the largest number of a token, with 0 exact. A stored zero point is added
    to the codes."""
    x = torch.tensor([[-1.0, 0.0, 4.1], [2.0, 3.0, 5.1], [0.0, 0.0, 0.0]])
    rounding = Rounding("int8", is_symmetric=False)
    codes, scales, zeros = rounding.quantize(x)
    torch.testing.assert_close(scales[:, 0], torch.tensor([5.1 / 255, 5.1 / 255, 1]))
    assert zeros[:, 0].tolist() == [-78, -128, -128]
    assert codes.tolist() == [[-128, -78, 127], [-28, 22, 127], [-128, -128, -128]]
    torch.testing.assert_close(rounding.rounded(x), x)
    stored = Rounding("int8", scale=0.5, is_symmetric=False, zero=-28)
    assert stored.quantize(x)[0].tolist() == [[-30, -28, -20], [-24, -22, -18], [-28] * 3]
    torch.testing.assert_close(stored.rounded(x)[1], torch.tensor([2, 3, 5.0]))
    assert not rounding.is_simple and Rounding("int8", 32, 0.5).is_simple


@pytest.mark.parametrize("kind", sorted(LARGEST))
def test_a_step_shares_a_scale(kind: str) -> None:
    x = torch.randn(4, 40)
    rounding = Rounding(kind, is_shared=True)
    codes, scales, _ = rounding.quantize(x)
    assert scales.unique().tolist() == [(x.abs().max() / LARGEST[kind]).item()]
    each = Rounding(kind, scale=scales[0].item()).quantize(x)[0]
    assert torch.equal(codes.float(), each.float())
    assert rounding.rounded(x[:0]).shape == (0, 40) and not rounding.is_simple
