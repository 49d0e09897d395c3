"""GPTQ weights, which the tests write as the format defines them: bit by bit, with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pegboard_quantization_gptq.auto_round import AutoRound
from pegboard_quantization_gptq.format import GPTQ
from pegboard_quantization_gptq.plugin import AUTO_ROUND, WNA16
from pegboard_quantization_gptq.plugin import GPTQ as SPEC
from pegboard_quantization_gptq.wna16 import wna16
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import TensorEntry, WeightPiece
from pegboard.ops import REFERENCES
from pegboard.ops.blocks import BlockWeight
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import QuantizationContract, stored_pieces
from pegboard_testing.layouts import bit_stream as words
from pegboard_testing.layouts import marlin_24, scales_of_marlin_24


@pytest.mark.parametrize(
    "name",
    [
        "gptq",
        "gptq_marlin",
        "cpu_gptq",
        "gptq_bitblas",
        "gptq_marlin_24",
        "moe_wna16",
        "ipex",
        "bitblas",
        "auto_gptq",
        "auto-round",
        "inc",
        "intel/auto-round",
    ],
)
def test_contract(name: str) -> None:
    check_entry(installed_entry("quantization", name))


class TestFourBits(QuantizationContract):
    spec = SPEC
    bits = 4
    group_size = 32
    version = "gptq"
    act_order = False
    block = row_block = 32
    """Words hold whole rows."""

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        config = {"quant_method": "gptq", "bits": self.bits, "group_size": self.group_size}
        return {**config, "desc_act": self.act_order, "checkpoint_format": self.version}

    def method(self, setup: QuantizationSetup) -> Any:
        return GPTQ(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        if part.name.startswith("model.embed"):
            return [WeightPiece(part.name, dtype, tuple(values.shape), values)], values.to(
                getattr(torch, dtype)
            ).float()
        rows, columns = values.shape
        rng = np.random.default_rng(abs(int(values[0, 0] * 1e6)))
        size = columns if self.group_size == -1 else self.group_size
        offset = 1 if self.version == "gptq" else 0
        codes = rng.integers(0, 2**self.bits, (rows, columns))
        zeros = rng.integers(offset, 2**self.bits + offset, (rows, columns // size))
        zeros[0, 0] = 2**self.bits - 1 + offset
        scales = (rng.random(zeros.shape) * 0.1).astype(np.float16)
        group = np.arange(columns) // size
        if self.act_order:  # merged parts see the same activations, so they have the same order
            group = np.random.default_rng(columns).permutation(group)
        true = (codes - zeros[:, group]) * scales.astype(np.float32)[:, group]
        tensors = {
            "qweight": words(codes.T, self.bits),
            "qzeros": words(zeros - offset, self.bits).T.contiguous(),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        if self.act_order:
            tensors["g_idx"] = torch.from_numpy(group.astype(np.int32))
        module = part.name.removesuffix(".weight")
        return stored_pieces(module, tensors), torch.from_numpy(true.astype(np.float32)).to(
            getattr(torch, dtype)
        ).float()

    def test_weights_stay_packed(self) -> None:
        layer = self.layer((2,), self.block * 2)
        weight = self.linear(layer)
        self.fill(weight, layer, 1)
        assert type(weight.weight()) is BlockWeight


class TestNamesOfKernels(TestFourBits):
    spec = WNA16

    def method(self, setup: QuantizationSetup) -> Any:
        return wna16(None, setup)


class TestFourBitsInActOrder(TestFourBits):
    undivided = frozenset({"columns"})
    act_order = True


class TestFourBitsOfTheSecondVersion(TestFourBits):
    version = "gptq_v2"


class TestOneGroupPerRow(TestFourBits):
    group_size = -1


class TestLongGroups(TestFourBits):
    group_size = block = 128


class TestTwoBits(TestFourBits):
    bits = 2


class TestThreeBits(TestFourBits):
    bits = 3
    group_size = block = 64


class TestEightBits(TestFourBits):
    bits = 8


class TestEightBitsInActOrder(TestFourBits):
    undivided = frozenset({"columns"})
    bits = 8
    act_order = True


class TestMarlin24(TestFourBits):
    version = "marlin_24"
    group_size = block = 128
    row_block = 64

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        if part.name.startswith("model.embed"):
            return super().stored(part, values, dtype)
        rng = np.random.default_rng(abs(int(values[0, 0] * 1e6)))
        half = 1 << (self.bits - 1)
        (rows, columns) = values.shape
        left_out = rng.random((rows * columns // 4, 4)).argsort(1).reshape(rows, columns) < 2
        codes = np.where(left_out, half, rng.integers(0, 2 * half, (rows, columns)))
        scales = (rng.random((rows, columns // self.group_size)) * 0.1).astype(np.float16)
        packed, meta = marlin_24(codes, self.bits)
        tensors = {"B_24": packed, "B_meta": meta, "s": scales_of_marlin_24(scales, columns)}
        true = torch.from_numpy(
            (codes - half) * scales.astype(np.float32).repeat(self.group_size, 1)
        )
        return stored_pieces(part.name.removesuffix(".weight"), tensors), true.to(
            getattr(torch, dtype)
        ).float()


class TestAutoRound(TestFourBits):
    spec = AUTO_ROUND

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        config = {"quant_method": "auto-round", "bits": self.bits, "group_size": self.group_size}
        return {**config, "packing_format": "auto_round:auto_gptq"}

    def method(self, setup: QuantizationSetup) -> AutoRound:
        return AutoRound(None, setup)


class TestAutoRoundTwoBits(TestAutoRound):
    bits = 2


def method(**config: Any) -> GPTQ:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, **config}
    return GPTQ(None, QuantizationSetup(config, "float32", "cpu", REFERENCES))


def layer_at(module: str, **more: Any) -> LinearLayer:
    return LinearLayer(module, 64, 32, (Part(f"{module}.weight", (0, 32)),), **more)


def test_what_is_not_quantized() -> None:
    found = method(
        dynamic={
            "-:.*visual": {},
            r"+:.*\.layers\.1\.": {"bits": 8},
            r".*\.layers\.2\.": {"group_size": 64},
        }
    )
    assert found.embedding(EmbeddingLayer("embed", 8, 128, Part("embed.weight", (0, 8)))) is None
    assert found.linear(layer_at("lm_head", is_head=True)) is None
    assert method(lm_head=True).linear(layer_at("lm_head", is_head=True)) is not None
    assert found.linear(layer_at("model.visual.q")) is None
    for module, bits, size in [
        ("model.layers.0.q", 4, 32),
        ("model.layers.1.q", 8, 32),
        ("model.layers.2.q", 4, 64),
    ]:
        weight = found.linear(layer_at(module))
        assert weight is not None
        [reader] = weight.readers.values()
        assert (reader.bits, reader.group_size) == (bits, size)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"bits": 5}, "bits=5; GPTQ supports 2, 3, 4, 8"),
        ({"bits": None}, "bits=None"),
        ({"group_size": -2}, "group_size=-2"),
        (
            {"checkpoint_format": "marlin"},
            "checkpoint_format='marlin'; GPTQ supports 'gptq', 'gptq_v2', 'marlin_24'",
        ),
        (
            {"checkpoint_format": "bitblas"},
            "stored in BitBLAS' own layout, which depends on the GPU",
        ),
        ({"is_bitblas_format": True}, "use the GPTQ checkpoint that it was made from"),
        ({"checkpoint_format": "marlin_24", "sym": False}, "sym=False; GPTQ supports True"),
        ({"quant_method": "gptq_marlin_24", "bits": 3}, "bits=3; GPTQ supports 4, 8"),
        ({"lm_head": "yes"}, "lm_head='yes'"),
        ({"dynamic": ["x"]}, "dynamic=\\['x'\\]; GPTQ needs an object"),
        ({"dynamic": {"(": {}}}, "has the pattern '\\(' in dynamic"),
    ],
)
def test_odd_configs_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        method(**config)


@pytest.mark.parametrize("group", [-1, 2, 2**31 - 1])
def test_groups_that_do_not_exist_are_refused(group: int) -> None:
    contract = TestFourBitsInActOrder()
    layer = contract.layer((1,), 64)
    weight = contract.linear(layer)
    weight.declare(
        {"model.part0.g_idx": TensorEntry("model.part0.g_idx", (64,), "int32", "", 0, 0)}
    )
    pieces, _ = contract.stored(layer.parts[0], contract.values(0, 32, 64), "float32")
    for piece in pieces:
        if piece.name.endswith("g_idx"):
            assert isinstance(piece.data, Tensor)
            piece.data[5] = group
        weight.accept(piece)
    with pytest.raises(ModelError, match="g_idx names groups from"):
        weight.finish()


def test_groups_of_unequal_size_are_held_as_floats() -> None:
    contract = TestFourBitsInActOrder()
    layer = contract.layer((1,), 64)
    weight = contract.linear(layer)
    weight.declare(
        {"model.part0.g_idx": TensorEntry("model.part0.g_idx", (64,), "int32", "", 0, 0)}
    )
    pieces, _ = contract.stored(layer.parts[0], contract.values(0, 32, 64), "float32")
    by_name = {piece.name.rpartition(".")[2]: piece for piece in pieces}
    group = torch.zeros(64, dtype=torch.int32)
    group[:7] = 1
    by_name["g_idx"].data = group
    for piece in pieces:
        weight.accept(piece)
    weight.finish()
    assert type(weight.weight()) is not BlockWeight
    weight_of = weight.dequantize()
    scale = by_name["scales"].data
    assert isinstance(scale, Tensor)
    steps = weight_of / scale.float().T[:, group.long()]
    assert torch.allclose(steps, steps.round(), atol=1e-3)
