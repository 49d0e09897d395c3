"""Norms, rotary embedding and gated activations under Triton's interpreter, compared with their
references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pegboard_kernel_triton import elementwise, norm

from pegboard import ops
from pegboard_testing.contract_generic import check_entry, installed_entry

pytestmark = [
    pytest.mark.usefixtures("interpreted_triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # where sigmoid is 0
]
SOME = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
widths = st.sampled_from([1, 5, 64, 100])
dtypes = st.sampled_from(list(TOLERANCES))


def close(found: torch.Tensor, expected: torch.Tensor, size: float = 1.0) -> bool:
    allowed = TOLERANCES[found.dtype]
    return found.dtype == expected.dtype and torch.allclose(
        found.float(), expected.float(), rtol=allowed, atol=allowed * size
    )


NORMS = ["rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"]


@pytest.mark.parametrize("name", [*NORMS, "rope", "silu_mul", "gelu_tanh_mul"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("kernel", f"{name}.triton"))


@SOME
@given(st.integers(0, 5), widths, dtypes)
def test_norms(count: int, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (
        torch.randn(*shape).to(dtype) for shape in ((count, width), (count, width), (width,))
    )
    assert close(norm.rms_norm(x, weight.float(), 1e-5), ops.rms_norm(x, weight.float(), 1e-5))
    expected, expected_sum = ops.add_rms_norm(x, residual.clone(), weight.float(), 1e-5)
    found, total = norm.add_rms_norm(x, residual, weight.float(), 1e-5)
    assert total is residual and close(total, expected_sum) and close(found, expected)


@SOME
@given(st.integers(0, 5), widths, st.booleans(), dtypes)
def test_layer_norms(count: int, width: int, has_bias: bool, dtype: torch.dtype) -> None:
    """Also of rows whose mean is far from zero."""
    x, residual = (10 + torch.randn(count, width).to(dtype) for _ in range(2))
    weight = torch.randn(width)
    rest = (weight, torch.randn(width).to(dtype) if has_bias else None, 1e-5)
    assert close(norm.layer_norm(x, *rest), ops.layer_norm(x, *rest), size=5)
    expected, expected_sum = ops.add_layer_norm(x, residual.clone(), *rest)
    found, total = norm.add_layer_norm(x, residual, *rest)
    assert total is residual and close(total, expected_sum) and close(found, expected, size=5)


@SOME
@given(st.integers(0, 3), st.integers(1, 5), st.sampled_from([3, 16, 80]), dtypes)
def test_norms_of_heads_inside_wider_rows(
    count: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    x = torch.randn(count, heads + 3, width).to(dtype)[:, 1 : heads + 1]
    weight = torch.randn(width)
    assert close(norm.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6))
    rest = (weight, None, 1e-5)
    assert close(norm.layer_norm(x, *rest), ops.layer_norm(x, *rest), size=5)


@SOME
@given(
    st.integers(0, 3),
    st.integers(1, 6),
    st.sampled_from([2, 3, 8]),
    st.sampled_from([0, 5]),
    st.booleans(),
    dtypes,
)
def test_rope(
    count: int, heads: int, turned: int, copied: int, pairs: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(count, heads + 2, 2 * turned + copied).to(dtype)[:, 1 : heads + 1]
    angles = torch.randn(count, turned)
    cos = 1.5 * angles.cos()
    sin = 1.5 * angles.sin()  # some scaling rules also enlarge
    assert close(elementwise.rope(x, cos, sin, pairs), ops.rope(x.clone(), cos, sin, pairs), size=3)


@SOME
@given(st.integers(0, 3), widths, st.sampled_from([0.1, 1, 60]), dtypes)
def test_gated_activations(count: int, width: int, size: float, dtype: torch.dtype) -> None:
    # rows inside wider rows
    x = (torch.randn(count + 1, 2 * width + 3) * size).to(dtype)[1:, : 2 * width]
    assert close(elementwise.silu_mul(x), ops.silu_mul(x), size**2)
    assert close(elementwise.gelu_tanh_mul(x), ops.gelu_tanh_mul(x), size**2)


def test_a_row_longer_than_one_program_takes_several() -> None:
    x = torch.randn(2, 2 * 2500)
    assert close(elementwise.silu_mul(x), ops.silu_mul(x))
