"""The methods pass the contract of their kind and the generic contract."""

from __future__ import annotations

import pytest
import torch
from pegboard_quantization_integer.plain import Plain
from pegboard_quantization_integer.plugin import NONE
from torch import Tensor

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.quantization import Part, QuantizationSetup
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.ops import REFERENCES
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import QuantizationContract


@pytest.mark.parametrize(
    "name", ["none", "rtn", "rtn_int8", "rtn_int4", "w8a8_int8", "tpu_int8", "experts_int8"]
)
def test_contract(name: str) -> None:
    check_entry(installed_entry("quantization", name))


class TestPlain(QuantizationContract):
    spec = NONE

    def method(self, setup: QuantizationSetup) -> Plain:
        return Plain(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        rounded = values.to(getattr(torch, dtype))
        return [WeightPiece(part.name, dtype, tuple(values.shape), rounded)], rounded.float()


class TestPlainFromBfloat16(TestPlain):
    """Checkpoints can have a plain type other than that of the activations."""

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        rounded = values.bfloat16()
        return [WeightPiece(part.name, "bfloat16", tuple(values.shape), rounded)], rounded.to(
            getattr(torch, dtype)
        ).float()


def test_a_quantized_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="'awq'"):
        Plain(None, QuantizationSetup({"quant_method": "awq"}, "float32", "cpu", REFERENCES))


def test_quantized_blocks_are_refused() -> None:
    method = Plain(None, QuantizationSetup({}, "float32", "cpu", REFERENCES))
    weight = method.linear(TestPlain().layer((2,), 4))
    with pytest.raises(ModelError, match=r"model\.part0\.weight is stored as Q4_1"):
        weight.accept(WeightPiece("model.part0.weight", "Q4_1", (2, 4), memoryview(b"1234")))
