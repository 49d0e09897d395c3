"""Weights of small floats of compressed-tensors, which the tests write as the formats define them,
with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pegboard_quantization_compressed_tensors.method import CompressedTensors
from pegboard_quantization_compressed_tensors.plugin import COMPRESSED_TENSORS
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Part, QuantizationSetup
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.ops.float_codes import CodeWeight
from pegboard_testing.contract_quantization import QuantizationContract, load_pieces, stored_pieces
from pegboard_testing.layouts import FP4, bit_stream, nibble_pairs


class TestFloat8(QuantizationContract):
    spec = COMPRESSED_TENSORS
    format = "float-quantized"
    weights: dict[str, Any] = {"num_bits": 8, "strategy": "channel"}
    block = 32

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        group = {
            "targets": ["Linear"],
            "weights": {"type": "float", "symmetric": True, **self.weights},
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "config_groups": {"group_0": group},
        }

    def method(self, setup: QuantizationSetup) -> CompressedTensors:
        return CompressedTensors(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        tensors, true = self.tensors(
            values.numpy(), np.random.default_rng(abs(int(values[0, 0] * 1e6)))
        )
        exact = torch.from_numpy(true.astype(np.float32)).to(getattr(torch, dtype)).float()
        return stored_pieces(part.name.removesuffix(".weight"), tensors), exact

    def tensors(
        self, values: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        rows, columns = values.shape
        strategy = self.weights["strategy"]
        shape = {
            "tensor": (1,),
            "channel": (rows, 1),
            "group": (rows, columns // 16),
            "block": (-(-rows // 4), -(-columns // 64)),
        }
        scale = torch.from_numpy(rng.random(shape[strategy])).float()
        codes = torch.from_numpy(values).to(torch.float8_e4m3fn)
        wide = scale.numpy()
        if strategy in ("group", "block"):
            height = 1 if strategy == "group" else 4
            wide = wide.repeat(height, 0)[:rows].repeat(16 if strategy == "group" else 64, 1)[
                :, :columns
            ]
        return {"weight": codes, "weight_scale": scale}, codes.float().numpy() * wide

    def test_weights_stay_packed(self) -> None:
        layer = self.layer((2,), self.block * 2)
        weight = self.linear(layer)
        self.fill(weight, layer, 1)
        assert type(weight.weight()) is CodeWeight


class TestNVFP4(TestFloat8):
    format = "nvfp4-pack-quantized"
    weights = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}

    def tensors(
        self, values: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        rows, columns = values.shape
        codes = rng.integers(0, 16, (rows, columns))
        tensors = {"weight_packed": nibble_pairs(codes)}
        if self.format.startswith("mx"):
            exponents = rng.integers(120, 130, (rows, columns // 32)).astype(np.uint8)
            wide = 2.0 ** (exponents.astype(np.float32) - 127)
            return tensors | {"weight_scale": torch.from_numpy(exponents)}, FP4[
                codes
            ] * wide.repeat(32, 1)
        scale = torch.from_numpy(rng.random((rows, columns // 16)) * 400).to(torch.float8_e4m3fn)
        divisor = np.float32(rng.random() * 3000 + 7)
        tensors |= {"weight_scale": scale, "weight_global_scale": torch.tensor([divisor])}
        return tensors, FP4[codes] * (scale.float().numpy() / divisor).repeat(16, 1)


class TestMXFP4(TestNVFP4):
    format = "mxfp4-pack-quantized"
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}


class TestMXFP6(TestMXFP4):
    format = "mxfp6-pack-quantized"
    weights = {"num_bits": 6, "strategy": "group", "group_size": 32}

    def tensors(
        self, values: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        codes = rng.integers(0, 64, values.shape)
        exponents = rng.integers(120, 130, (len(values), values.shape[1] // 32))
        positive = [m / 8 for m in range(8)] + [
            (1 + m / 8) * 2.0**e for e in range(3) for m in range(8)
        ]
        table = np.array(positive + [-value for value in positive], np.float32)
        stream = bit_stream(codes.T, 6).T.contiguous().view(torch.uint8)
        tensors = {
            "weight_packed": stream,
            "weight_scale": torch.from_numpy(exponents.astype(np.uint8)),
        }
        return tensors, table[codes] * (2.0 ** (exponents - 127)).astype(np.float32).repeat(32, 1)


class TestMXFP8(TestFloat8):
    format = "mxfp8-quantized"
    weights = {"num_bits": 8, "strategy": "group", "group_size": 32}

    def tensors(
        self, values: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        codes = torch.from_numpy(values).to(torch.float8_e4m3fn)
        exponents = rng.integers(120, 130, (len(values), values.shape[1] // 32))
        wide = (2.0 ** (exponents - 127)).astype(np.float32).repeat(32, 1)
        return {
            "weight": codes,
            "weight_scale": torch.from_numpy(exponents.astype(np.uint8)),
        }, codes.float().numpy() * wide


class TestFloat8Blocks(TestFloat8):
    weights = {"num_bits": 8, "strategy": "block", "block_structure": [4, 64]}
    block = 64


def dequantized(contract: TestFloat8, rows: tuple[int, ...], columns: int) -> tuple[Tensor, Tensor]:
    layer = contract.layer(rows, columns)
    weight = contract.linear(layer)
    matrix = contract.fill(weight, layer, 5)
    return weight.dequantize(), matrix


@pytest.mark.parametrize(
    ("format", "weights"),
    [
        ("float-quantized", {"num_bits": 8, "strategy": "tensor"}),
        ("naive-quantized", {"num_bits": 8, "strategy": "group", "group_size": 16}),
        ("float-quantized", {"num_bits": 8, "strategy": "block", "block_structure": [4, 64]}),
        ("float-quantized", {"num_bits": 8, "strategy": "block", "block_structure": "4x64"}),
        ("mxfp4-pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    ],
)
def test_other_schemes_mean_the_stored_values(format: str, weights: dict[str, Any]) -> None:
    contract = TestNVFP4() if format.startswith("mx") else TestFloat8()
    contract.format = format
    contract.weights = weights
    for columns in (96, 192):
        found, matrix = dequantized(contract, (6, 5), columns)
        assert torch.equal(found, matrix)


def test_columns_that_kernels_do_not_take_are_held_as_floats() -> None:
    found, matrix = dequantized(TestFloat8(), (3,), 20)
    assert torch.equal(found, matrix)


@pytest.mark.parametrize(
    ("contract", "name", "value", "told"),
    [
        (
            TestFloat8,
            "weight",
            torch.zeros(1, 64),
            "weight is stored as float32; this format needs float8_e4m3fn or",
        ),
        (TestFloat8, "weight_scale", torch.zeros(2, 1), r"weight_scale has shape \(2, 1\)"),
        (
            TestNVFP4,
            "weight_packed",
            torch.zeros(1, 31, dtype=torch.uint8),
            "weight_packed has shape .1, 31.",
        ),
        (
            TestNVFP4,
            "weight_scale",
            torch.zeros(1, 4),
            "weight_scale is stored as float32; this format needs float8_e4m3fn",
        ),
        (
            TestNVFP4,
            "weight_global_scale",
            torch.zeros(1),
            "weight_global_scale is 0.0; this format divides by it",
        ),
        (TestNVFP4, "weight_global_scale", None, "did not contain model.part0.weight_global_scale"),
    ],
)
def test_broken_tensors_are_refused_by_name(
    contract: type[TestFloat8], name: str, value: Tensor | None, told: str
) -> None:
    made = contract()
    tensors, _ = made.tensors(np.zeros((1, 64), np.float32), np.random.default_rng(0))
    changed = {
        key: data for key, data in (tensors | {name: value}).items() if isinstance(data, Tensor)
    }
    weight = made.linear(made.layer((1,), 64))
    with pytest.raises(ModelError, match=told):
        load_pieces(weight, stored_pieces("model.part0", changed))
