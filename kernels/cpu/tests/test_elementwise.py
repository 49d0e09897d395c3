"""Norms and gated activations, compared with their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kernel_cpu import elementwise

from pegboard import ops
from pegboard_weights.hadamard import hadamard

pytestmark = pytest.mark.usefixtures("native")

SOME = settings(max_examples=15, deadline=None)
widths = st.sampled_from([1, 5, 8, 17, 64, 576, 1000])


@SOME
@given(st.integers(1, 40), widths)
def test_norms(count: int, width: int) -> None:
    x = torch.randn(count, width) * 3
    residual = torch.randn(count, width)
    weight = torch.randn(width)
    expected_sum = x + residual
    assert torch.allclose(
        elementwise.rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5), atol=1e-5, rtol=1e-5
    )
    out, total = elementwise.add_rms_norm(x, residual, weight, 1e-5)
    assert total is residual and torch.equal(total, expected_sum)
    assert torch.allclose(out, ops.rms_norm(expected_sum, weight, 1e-5), atol=1e-5, rtol=1e-5)


@SOME
@given(st.integers(1, 40), widths, st.booleans())
def test_norms_that_subtract_the_mean(count: int, width: int, has_bias: bool) -> None:
    """Means far from 0 take no digits from the variance."""
    x = torch.randn(count, width) + 50
    residual = torch.randn(count, width)
    weight = torch.randn(width)
    bias = torch.randn(width) if has_bias else None
    expected_sum = x + residual
    expected = [
        ops.layer_norm(each.double(), weight, bias, 1e-5).float() for each in (x, expected_sum)
    ]
    assert torch.allclose(
        elementwise.layer_norm(x, weight, bias, 1e-5), expected[0], atol=2e-4, rtol=1e-4
    )
    out, total = elementwise.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert total is residual and torch.equal(total, expected_sum)
    assert torch.allclose(out, expected[1], atol=2e-4, rtol=1e-4)


@SOME
@given(st.integers(1, 9), st.integers(1, 5), st.sampled_from([4, 16, 64]))
def test_norms_of_heads_inside_wider_rows(count: int, heads: int, width: int) -> None:
    x = torch.randn(count, heads + 3, width)[:, 1 : heads + 1]
    weight = torch.randn(width)
    assert torch.allclose(
        elementwise.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6), atol=1e-5
    )
    found = elementwise.layer_norm(x, weight, weight, 1e-5)
    assert torch.allclose(found, ops.layer_norm(x, weight, weight, 1e-5), atol=1e-4, rtol=1e-4)


@SOME
@given(st.integers(1, 40), widths, st.floats(0.1, 60))
def test_gated_activations(count: int, width: int, size: float) -> None:
    x = torch.randn(count, 2 * width) * size
    assert torch.allclose(elementwise.silu_mul(x), ops.silu_mul(x), rtol=1e-4, atol=1e-5 * size)
    assert torch.allclose(
        elementwise.gelu_tanh_mul(x), ops.gelu_tanh_mul(x), rtol=1e-4, atol=1e-5 * size**2
    )


@SOME
@given(st.integers(1, 40), st.integers(0, 11), st.integers(1, 5))
def test_hadamard(count: int, doublings: int, groups: int) -> None:
    x = torch.randn(count, groups * 2**doublings + 3)[:, : groups * 2**doublings]
    before = x.clone()
    found = elementwise.hadamard(x, 2**doublings)
    torch.testing.assert_close(found, hadamard(x, 2**doublings), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(elementwise.hadamard(found, 2**doublings), x, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)
