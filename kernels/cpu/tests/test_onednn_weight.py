"""The weights in oneDNN's layout."""

from __future__ import annotations

import platform

import pytest
import torch
from pegboard_kernel_cpu import onednn_weight
from pegboard_kernel_cpu.onednn_weight import OneDNNBlockWeight, OneDNNFloatWeight
from pegboard_kernel_cpu.plugin import FLOAT_WEIGHT_ONEDNN
from pegboard_kernel_cpu.probe import probe_onednn

from pegboard.interfaces.spec import Absent, Ok, ProbeFacts
from pegboard.ops.blocks import Blocks
from pegboard_testing.contract_float_weight import FloatWeightContract
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.held_memory import held_bytes

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="oneDNN's layout is for x86"
)


class TestOneDNNFloatWeight(FloatWeightContract):
    weight_class = OneDNNFloatWeight

    def test_one_copy_unless_the_plain_one_is_needed(self) -> None:
        values = torch.randn(64, 64)
        alone = self.filled(values)
        both = self.filled(values, is_table=True)
        alone.bind()
        assert held_bytes(alone) == values.nbytes
        assert held_bytes(both) == values.nbytes
        address = both.plain().data_ptr()
        both.bind()
        assert both.plain().data_ptr() == address
        assert held_bytes(both) == 2 * values.nbytes

    def test_a_large_table_is_not_held_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onednn_weight, "COPY_LIMIT_BYTES", 100)
        values = torch.randn(64, 64)
        x = torch.randn(2, 64)
        weight = self.filled(values, is_table=True)
        torch.testing.assert_close(weight.bind()(x), x @ values.T, rtol=1e-4, atol=1e-4)
        assert held_bytes(weight) == values.nbytes


def test_blocks_are_held_the_same_way() -> None:
    codes = torch.randint(-127, 128, (48, 64)).to(torch.int8)
    scale = torch.rand(48, 2)
    weight = OneDNNBlockWeight((48, 64), torch.float32, "cpu")
    x = torch.randn(3, 64)
    blocks = Blocks(8, 32, codes, scale)
    weight.write(0, blocks)
    weight.finish()
    torch.testing.assert_close(weight.bind()(x), x @ blocks.dense().T, rtol=1e-4, atol=1e-3)
    assert type(weight._float) is OneDNNFloatWeight and held_bytes(weight) == 4 * 48 * 64


def test_other_machines_and_types_go_without() -> None:
    arm, x86 = (ProbeFacts(machine) for machine in ("aarch64", "x86_64"))
    assert isinstance(probe_onednn(arm), Absent) and isinstance(probe_onednn(x86), Ok)
    assert FLOAT_WEIGHT_ONEDNN.supports == {"dtype": {"float32"}}
    check_entry(installed_entry("kernel", "float_weight.onednn"))
