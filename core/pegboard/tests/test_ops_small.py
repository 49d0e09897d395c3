"""Compares the small ops with their formulas in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.ops.norm import add_rms_norm, rms_norm
from pegboard.ops.rope import rope


def naive_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: bool) -> torch.Tensor:
    """Rotate channel by channel."""
    out = x.double().clone()
    count = cos.shape[-1]
    for channel in range(count):
        a, b = (2 * channel, 2 * channel + 1) if pairs else (channel, channel + count)
        c = cos[:, channel, None].double()
        s = sin[:, channel, None].double()
        first = x[..., a].double()
        second = x[..., b].double()
        out[..., a] = first * c - second * s
        out[..., b] = second * c + first * s
    return out


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 5),
    heads=st.integers(1, 3),
    rotary=st.integers(1, 6),
    rest=st.integers(0, 5),
    pairs=st.booleans(),
    offset=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_rope(
    tokens: int, heads: int, rotary: int, rest: int, pairs: bool, offset: int, seed: int
) -> None:
    """rope also works on views that start anywhere, such as slices of a merged projection, and
    keeps channels that are not rotated."""
    generator = torch.Generator().manual_seed(seed)
    width = 2 * rotary + rest
    buffer = torch.randn(tokens, heads + 2, width + offset, generator=generator)
    x = buffer[:, 1 : heads + 1, offset:]
    angles = torch.randn(tokens, rotary, generator=generator)
    before = x.clone()
    turned = rope(x, angles.cos(), angles.sin(), pairs)
    assert turned.shape == x.shape
    torch.testing.assert_close(
        turned.double(), naive_rope(before, angles.cos(), angles.sin(), pairs), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("pairs", [True, False])
def test_rope_keeps_the_type(pairs: bool) -> None:
    x = torch.randn(4, 2, 8).bfloat16()
    angles = torch.randn(4, 4)
    turned = rope(x, angles.cos(), angles.sin(), pairs)
    assert turned.dtype == torch.bfloat16
    expected = naive_rope(x, angles.cos(), angles.sin(), pairs)
    torch.testing.assert_close(turned.double(), expected, rtol=0.03, atol=0.03)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 5),
    width=st.integers(1, 40),
    eps=st.sampled_from([1e-6, 1e-5, 0.1]),
    seed=st.integers(0, 99),
)
def test_rms_norm(rows: int, width: int, eps: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, other = torch.randn(2, rows, width, generator=generator).unbind(0)
    weight = torch.randn(width, generator=generator)
    total = x.double() + other.double()
    expected = total / (total.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    residual = other.clone()
    normed, summed = add_rms_norm(x, residual, weight, eps)
    assert summed is residual
    torch.testing.assert_close(normed.double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(rms_norm(summed, weight, eps), normed)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6), torch.zeros(2, 4))
