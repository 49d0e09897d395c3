"""Contract tests of float weights: core's own and every kernel `float_weight.*`. A package's test
file:

class TestMyWeight(FloatWeightContract):
    weight_class = MyFloatWeight
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pegboard.ops.linear import FloatWeight
from pegboard_testing.contract_invariance import SIZES, check_experts, check_rows


class FloatWeightContract:
    """Every float weight passes these. It multiplies like the matrix that was written, in whatever
    layout it is stored, and returns the values bit for bit."""

    weight_class: ClassVar[type[FloatWeight]]
    is_invariant = False
    """Whether the kernel has the flag "batch_invariant"."""
    sizes: ClassVar[Sequence[int]] = SIZES
    every = 1
    """See `contract_invariance`."""

    def filled(self, values: torch.Tensor, is_table: bool = False) -> FloatWeight:
        """Return a finished weight with these values, [out, in], which multiplies float32."""
        weight = self.weight_class(
            tuple(values.shape), values.dtype, "cpu", is_table, activations=torch.float32
        )
        weight.plain().copy_(values)
        weight.finish()
        return weight

    @settings(
        max_examples=40, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    @given(
        rows=st.integers(0, 40),
        out=st.integers(1, 70),
        width=st.integers(1, 70),
        seed=st.integers(0, 99),
        is_table=st.booleans(),
    )
    def test_product_and_values(
        self, rows: int, out: int, width: int, seed: int, is_table: bool
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(out, width, generator=generator)
        x = torch.randn(rows, width, generator=generator)
        weight = self.filled(values, is_table)
        product = weight.bind()(x)
        assert product.shape == (rows, out)
        torch.testing.assert_close(
            product.double(), x.double() @ values.double().T, rtol=1e-4, atol=1e-4
        )
        assert torch.equal(weight.dense(), values)

    @settings(
        max_examples=40, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    @given(
        dtype=st.sampled_from([torch.bfloat16, torch.float16]),
        rows=st.integers(0, 40),
        out=st.integers(1, 70),
        width=st.integers(1, 70),
        seed=st.integers(0, 99),
    )
    def test_16_bits(self, dtype: torch.dtype, rows: int, out: int, width: int, seed: int) -> None:
        """Inputs and results are float32. A product may round them to the type of the weight."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(out, width, generator=generator).to(dtype)
        x = torch.randn(rows, width, generator=generator)
        weight = self.filled(values, is_table=True)
        product = weight.bind()(x)
        assert product.dtype == torch.float32
        error = (product.double() - x.double() @ values.double().T).abs()
        step = torch.finfo(dtype).eps
        assert (error <= step * (x.abs() @ values.float().abs().T) + 1e-4).all()
        assert torch.equal(weight.dense(), values)
        ids = torch.arange(out).flip(0)
        assert torch.equal(weight.bind_lookup()(ids), values[ids].float())

    def test_inputs_that_are_views(self) -> None:
        values = torch.randn(24, 32)
        wide = torch.randn(9, 80)
        call = self.filled(values).bind()
        for x in (wide[:, :32], wide[::2, 7:39], wide.T[:32].T):
            torch.testing.assert_close(call(x), x @ values.T, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("is_table", [False, True])
    def test_new_values_reach_callables_already_bound(self, is_table: bool) -> None:
        weight = self.filled(torch.randn(16, 8), is_table)
        call = weight.bind()
        values = torch.randn(16, 8)
        weight.plain()[:8] = values[:8]
        weight.plain()[8:] = values[8:]
        weight.finish()
        x = torch.randn(3, 8)
        torch.testing.assert_close(call(x), x @ values.T, rtol=1e-4, atol=1e-4)
        assert torch.equal(weight.dense(), values)

    def test_rows_of_a_table_are_looked_up(self) -> None:
        weight = self.filled(torch.randn(16, 8), is_table=True)
        look_up = weight.bind_lookup()
        ids = torch.tensor([15, 0, 3, 3])
        weight.bind()
        assert torch.equal(look_up(ids), weight.plain()[ids])
        weight.plain().fill_(2.0)
        weight.finish()
        assert torch.equal(look_up(ids), torch.full((4, 8), 2.0))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_a_row_has_the_same_bits_in_every_batch(self, dtype: torch.dtype) -> None:
        if not self.is_invariant:
            pytest.skip("batch_invariant is not declared")
        generator = torch.Generator().manual_seed(1)
        values = torch.randn(96, 700, generator=generator).to(dtype)
        x = torch.randn(130, 700, generator=generator)
        weight = self.filled(values)
        check_rows(weight.bind(), x, self.sizes)
        check_experts(weight.bind_experts(3, None), x, (30, 1, 99), self.every)
