"""Weights that are quantized while they are loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_quantization_integer.online import ExpertsInt8, Int4, Int8, Rtn, TPUInt8
from pegboard_quantization_integer.options import RtnOptions
from pegboard_quantization_integer.plugin import EXPERTS_INT8, RTN, RTN_INT4, RTN_INT8, TPU_INT8
from pegboard_quantization_integer.rounding import BLOCK_SIZE, round_to_blocks
from pydantic import ValidationError
from torch import Tensor

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.ops import REFERENCES
from pegboard.ops.blocks import Blocks
from pegboard_testing.contract_quantization import QuantizationContract

SETUP = QuantizationSetup({}, "float32", "cpu", REFERENCES)


def rounded(values: Tensor, bits: int, block_size: int = BLOCK_SIZE) -> Blocks:
    blocks = round_to_blocks(values, bits, block_size)
    assert blocks is not None
    return blocks


# --- rounding -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 8),
    size=st.sampled_from([32, 64]),
    seed=st.integers(0, 999),
    exponent=st.integers(-12, 2),
    offset=st.sampled_from([0.0, 3.0, -50.0]),
)
def test_no_value_moves_further_than_half_a_step(
    bits: int, size: int, seed: int, exponent: int, offset: float
) -> None:
    values = (
        torch.randn(5, 64, generator=torch.Generator().manual_seed(seed)) + offset
    ) * 10.0**exponent
    blocks = rounded(values, bits, size)
    assert blocks.bits == bits and (bits == 8 or int(blocks.codes.max()) < 2**bits)
    step = blocks.scale.float().repeat_interleave(size, dim=1)
    off = (blocks.dense() - values).abs()
    assert bool((off <= step * 0.5001 + values.abs() * 1e-5).all())
    by_block = values.view(5, -1, size)
    has_minimum = bits <= 4
    last = (2**bits if bits <= 4 else 2 ** (bits - 1)) - 1
    full = (
        (by_block.amax(2) - by_block.amin(2)) / last
        if has_minimum
        else by_block.abs().amax(2) / last
    )
    # the scale may be larger only because it, or the minimum, is rounded to float16
    slack = full * 2e-3 + 1.3e-7 + (by_block.abs().amax(2) * 1e-3 / last if has_minimum else 0.0)
    assert bool((blocks.scale.float() <= full + slack).all())


@pytest.mark.parametrize("bits", [4, 8])
def test_values_the_codes_can_hold_come_back_exactly(bits: int) -> None:
    low, high = (0, 16) if bits == 4 else (-127, 128)
    codes = torch.randint(low, high, (3, 96), generator=torch.Generator().manual_seed(bits))
    codes.view(3, -1, BLOCK_SIZE)[:, :, 0] = low
    codes.view(3, -1, BLOCK_SIZE)[:, :, 1] = high - 1
    values = codes * 0.25
    assert torch.equal(rounded(values, bits).dense(), values)


@pytest.mark.parametrize("bits", [4, 8])
def test_constant_blocks(bits: int) -> None:
    for value in (0.0, 0.5, -0.5):
        found = rounded(torch.full((2, 32), value), bits).dense()
        torch.testing.assert_close(found, torch.full((2, 32), value), rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 1e30])
def test_what_has_no_scale_is_refused(bits: int, bad: float) -> None:
    values = torch.randn(4, 64)
    values[2, 40] = bad
    assert round_to_blocks(values, bits) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_rows_of_any_float_type(dtype: torch.dtype) -> None:
    """The rows are rounded in more than one chunk. The values are representable in the stored
    type."""
    values = torch.randn(40_000, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = rounded(values, 8)
    assert torch.equal(
        found.dense(), torch.cat([rounded(part.float(), 8).dense() for part in values.split(777)])
    )


# --- methods --------------------------------------------------------------------------------------


class TestInt8(QuantizationContract):
    spec = RTN_INT8
    block = 32
    bits = 8

    def method(self, setup: QuantizationSetup) -> Any:
        return Int8(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        bits = 8 if "embed" in part.name else self.bits
        values = values.bfloat16()
        true = rounded(values, bits).dense().to(getattr(torch, dtype)).float()
        return [WeightPiece(part.name, "bfloat16", tuple(values.shape), values)], true


class TestInt4(TestInt8):
    spec = RTN_INT4
    bits = 4

    def method(self, setup: QuantizationSetup) -> Rtn:
        return Int4(None, setup)


class TestTPUInt8(TestInt8):
    spec = TPU_INT8

    def method(self, setup: QuantizationSetup) -> TPUInt8:
        return TPUInt8(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        values = values.bfloat16()
        true = rounded(values, 8, values.shape[1]).dense().to(getattr(torch, dtype)).float()
        return [WeightPiece(part.name, "bfloat16", tuple(values.shape), values)], true


class TestExpertsInt8(TestTPUInt8):
    spec = EXPERTS_INT8
    only_experts = True

    def method(self, setup: QuantizationSetup) -> ExpertsInt8:
        return ExpertsInt8(None, setup)


class TestRtn(TestInt8):
    spec = RTN
    bits = 6

    def method(self, setup: QuantizationSetup) -> Rtn:
        return Rtn(RtnOptions(bits=6), setup)


def loaded(weight: Any, values: Tensor) -> Tensor:
    [wanted] = weight.declare({})
    name = wanted.name
    weight.accept(WeightPiece(name, "float32", tuple(values.shape), values))
    weight.finish()
    return weight.dequantize()


def test_heads_and_tables_keep_eight_bits() -> None:
    values = torch.randn(6, 64)
    method = Int4(None, SETUP)
    part = Part("w", (0, 6))
    head = method.linear(LinearLayer("lm_head", 64, 6, (part,), is_head=True))
    inner = method.linear(LinearLayer("up", 64, 6, (part,)))
    table = method.embedding(EmbeddingLayer("embed", 6, 64, part))
    assert torch.equal(loaded(head, values), rounded(values, 8).dense())
    assert torch.equal(loaded(table, values), rounded(values, 8).dense())
    assert torch.equal(loaded(inner, values), rounded(values, 4).dense())
    assert RtnOptions() == RtnOptions(bits=8, group_size=32)


def test_groups_of_the_size_that_was_asked_for() -> None:
    method = Rtn(RtnOptions(bits=3, group_size=128), SETUP)
    values = torch.randn(6, 256)
    part = Part("w", (0, 6))
    inner = method.linear(LinearLayer("up", 256, 6, (part,)))
    head = method.linear(LinearLayer("lm_head", 256, 6, (part,), is_head=True))
    assert torch.equal(loaded(inner, values), rounded(values, 3, 128).dense())
    assert torch.equal(loaded(head, values), rounded(values, 8).dense())
    assert method.linear(LinearLayer("up", 192, 6, (part,))) is None


@pytest.mark.parametrize(
    "options",
    [{"bits": 1}, {"bits": 9}, {"group_size": 0}, {"group_size": 48}, {"group_size": -32}],
)
def test_options_that_are_not_supported(options: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        RtnOptions(**options)


def test_tables_and_heads_of_tpu_int8_are_plain() -> None:
    part = Part("w", (0, 6))
    method = TPUInt8(None, SETUP)
    assert method.linear(LinearLayer("lm_head", 64, 6, (part,), is_head=True)) is None
    assert method.embedding(EmbeddingLayer("embed", 6, 64, part)) is None
    with pytest.raises(ConfigError, match="already quantized \\('awq'\\)"):
        TPUInt8(None, QuantizationSetup({"quant_method": "awq"}, "float32", "cpu", REFERENCES))


def test_experts_int8_leaves_all_else_plain() -> None:
    part = Part("w", (0, 6))
    assert ExpertsInt8(None, SETUP).linear(LinearLayer("up", 64, 6, (part,))) is None
    assert ExpertsInt8(None, SETUP).embedding(EmbeddingLayer("embed", 6, 64, part)) is None
    assert ExpertsInt8(None, SETUP).linear(LinearLayer("up", 48, 6, (part,), num_experts=2)) is None
    assert (
        ExpertsInt8(None, SETUP).linear(LinearLayer("up", 64, 6, (part,), num_experts=2))
        is not None
    )


def test_narrow_layers_are_left_to_the_plain_method() -> None:
    part = Part("w", (0, 6))
    assert Int8(None, SETUP).linear(LinearLayer("up", 48, 6, (part,))) is None
    assert Int8(None, SETUP).embedding(EmbeddingLayer("embed", 6, 48, part)) is None


def test_quantized_checkpoints_are_refused() -> None:
    with pytest.raises(ConfigError, match="already quantized \\('gguf'\\)"):
        Int8(None, QuantizationSetup({"quant_method": "gguf"}, "float32", "cpu", REFERENCES))
    weight = Int8(None, SETUP).linear(LinearLayer("up", 32, 2, (Part("w", (0, 2)),)))
    assert weight is not None
    weight.declare({})
    weight.accept(WeightPiece("w", "Q8_0", (2, 32), memoryview(b"")))
    with pytest.raises(ModelError, match="w is stored as Q8_0"):
        weight.finish()
    with pytest.raises(ModelError, match="w has values that are not finite"):
        loaded(weight, torch.full((2, 32), float("nan")))
    with pytest.raises(ModelError, match="did not contain w"):
        weight.finish()
