"""A float weight multiplies like the plain matrix whatever layout it is kept in, and comes back bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.ops import linear
from pegboard.ops.linear import FloatWeight


def filled(values: torch.Tensor, keep_plain: bool = False) -> FloatWeight:
    weight = FloatWeight(tuple(values.shape), values.dtype, "cpu", keep_plain)
    weight.plain().copy_(values)
    weight.finish()
    return weight


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40), out=st.integers(1, 70), width=st.integers(1, 70), seed=st.integers(0, 99), keep_plain=st.booleans()
)
def test_product_and_values(rows: int, out: int, width: int, seed: int, keep_plain: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, x = torch.randn(out, width, generator=generator), torch.randn(rows, width, generator=generator)
    weight = filled(values, keep_plain)
    product = weight.bind()(x)
    assert product.shape == (rows, out)
    torch.testing.assert_close(product.double(), x.double() @ values.double().T, rtol=1e-4, atol=1e-4)
    assert torch.equal(weight.dense(), values)


def test_inputs_that_are_views() -> None:
    values, wide = torch.randn(24, 32), torch.randn(9, 80)
    call = filled(values).bind()
    for x in (wide[:, :32], wide[::2, 7:39], wide.T[:32].T):
        torch.testing.assert_close(call(x), x @ values.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep_plain", [False, True])
def test_new_values_reach_callables_already_bound(keep_plain: bool) -> None:
    weight = filled(torch.randn(16, 8), keep_plain)
    call = weight.bind()
    values = torch.randn(16, 8)
    weight.plain()[:8] = values[:8]
    weight.plain()[8:] = values[8:]
    weight.finish()
    x = torch.randn(3, 8)
    torch.testing.assert_close(call(x), x @ values.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(weight.dense(), values)


def test_one_copy_unless_the_plain_one_is_needed() -> None:
    values = torch.randn(64, 64)
    alone, both = filled(values), filled(values, keep_plain=True)
    alone.bind()
    assert alone.nbytes == values.nbytes
    assert both.nbytes == values.nbytes
    address = both.plain().data_ptr()
    both.bind()
    assert both.plain().data_ptr() == address
    assert both.nbytes == (2 if linear.is_packable(values) else 1) * values.nbytes


def test_rows_of_a_table_are_looked_up() -> None:
    weight = filled(torch.randn(16, 8), keep_plain=True)
    look_up, ids = weight.bind_lookup(), torch.tensor([15, 0, 3, 3])
    weight.bind()
    assert torch.equal(look_up(ids), weight.plain()[ids])
    weight.plain().fill_(2.0)
    weight.finish()
    assert torch.equal(look_up(ids), torch.full((4, 8), 2.0))


def test_a_large_table_is_not_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "COPY_LIMIT_BYTES", 100)
    values, x = torch.randn(64, 64), torch.randn(2, 64)
    weight = filled(values, keep_plain=True)
    torch.testing.assert_close(weight.bind()(x), x @ values.T, rtol=1e-4, atol=1e-4)
    assert weight.nbytes == values.nbytes


def test_other_types_stay_plain() -> None:
    values = torch.randn(16, 16, dtype=torch.bfloat16)
    weight, x = filled(values), torch.randn(2, 16, dtype=torch.bfloat16)
    assert weight.plain() is weight.plain()
    assert torch.equal(weight.bind()(x), torch.nn.functional.linear(x, values))
