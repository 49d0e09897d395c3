"""A float weight multiplies like the plain matrix whatever layout it is kept in, and comes back bit for bit."""

from __future__ import annotations

import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kernel_cpu import onednn_weight
from pegboard_kernel_cpu.onednn_weight import OneDNNBlockWeight, OneDNNFloatWeight
from pegboard_kernel_cpu.plugin import FLOAT_WEIGHT_ONEDNN
from pegboard_kernel_cpu.probe import probe_onednn

from pegboard.interfaces.spec import Absent, Ok, ProbeFacts
from pegboard.ops.blocks import Blocks
from pegboard_testing.contract_generic import check_entry, installed_entry

pytestmark = pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="oneDNN's layout is for x86")


def filled(values: torch.Tensor, is_table: bool = False) -> OneDNNFloatWeight:
    weight = OneDNNFloatWeight(tuple(values.shape), values.dtype, "cpu", is_table)
    weight.plain().copy_(values)
    weight.finish()
    return weight


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 40), out=st.integers(1, 70), width=st.integers(1, 70), seed=st.integers(0, 99), is_table=st.booleans())
def test_product_and_values(rows: int, out: int, width: int, seed: int, is_table: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, x = torch.randn(out, width, generator=generator), torch.randn(rows, width, generator=generator)
    weight = filled(values, is_table)
    product = weight.bind()(x)
    assert product.shape == (rows, out)
    torch.testing.assert_close(product.double(), x.double() @ values.double().T, rtol=1e-4, atol=1e-4)
    assert torch.equal(weight.dense(), values)


def test_inputs_that_are_views() -> None:
    values, wide = torch.randn(24, 32), torch.randn(9, 80)
    call = filled(values).bind()
    for x in (wide[:, :32], wide[::2, 7:39], wide.T[:32].T):
        torch.testing.assert_close(call(x), x @ values.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_table", [False, True])
def test_new_values_reach_callables_already_bound(is_table: bool) -> None:
    weight = filled(torch.randn(16, 8), is_table)
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
    alone, both = filled(values), filled(values, is_table=True)
    alone.bind()
    assert alone.nbytes == values.nbytes
    assert both.nbytes == values.nbytes
    address = both.plain().data_ptr()
    both.bind()
    assert both.plain().data_ptr() == address
    assert both.nbytes == 2 * values.nbytes


def test_rows_of_a_table_are_looked_up() -> None:
    weight = filled(torch.randn(16, 8), is_table=True)
    look_up, ids = weight.bind_lookup(), torch.tensor([15, 0, 3, 3])
    weight.bind()
    assert torch.equal(look_up(ids), weight.plain()[ids])
    weight.plain().fill_(2.0)
    weight.finish()
    assert torch.equal(look_up(ids), torch.full((4, 8), 2.0))


def test_a_large_table_is_not_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_weight, "COPY_LIMIT_BYTES", 100)
    values, x = torch.randn(64, 64), torch.randn(2, 64)
    weight = filled(values, is_table=True)
    torch.testing.assert_close(weight.bind()(x), x @ values.T, rtol=1e-4, atol=1e-4)
    assert weight.nbytes == values.nbytes


def test_blocks_are_held_the_same_way() -> None:
    codes, scale = torch.randint(-127, 128, (48, 64)).to(torch.int8), torch.rand(48, 2)
    weight, x = OneDNNBlockWeight((48, 64), torch.float32, "cpu"), torch.randn(3, 64)
    blocks = Blocks(8, 32, codes, scale)
    weight.write(0, blocks)
    weight.finish()
    torch.testing.assert_close(weight.bind()(x), x @ blocks.dense().T, rtol=1e-4, atol=1e-3)
    assert type(weight._float) is OneDNNFloatWeight and weight.nbytes == 4 * 48 * 64


def test_other_machines_and_types_go_without() -> None:
    arm, x86 = (ProbeFacts(machine) for machine in ("aarch64", "x86_64"))
    assert isinstance(probe_onednn(arm), Absent) and isinstance(probe_onednn(x86), Ok)
    assert FLOAT_WEIGHT_ONEDNN.supports == {"dtype": {"float32"}}
    check_entry(installed_entry("kernel", "float_weight.onednn"))
