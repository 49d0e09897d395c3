"""Checkpoints of the Model Optimizer, which the tests write as the formats define them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pegboard_quantization_modelopt.method import ModelOpt
from pegboard_quantization_modelopt.plugin import MODELOPT
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import LinearLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import TensorEntry, WeightPiece
from pegboard.ops import REFERENCES
from pegboard.ops.blocks import BlockWeight
from pegboard.ops.float_codes import CodeWeight
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import QuantizationContract, load_pieces, stored_pieces
from pegboard_weights.asked_rounding import AskedRounding

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.mark.parametrize(
    "name", ["modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "petit_nvfp4"]
)
def test_contract(name: str) -> None:
    check_entry(installed_entry("quantization", name))


def e4m3(code: int) -> float:
    """Return the value of a float8_e4m3fn by its definition: 1 sign, 4 exponent (bias 7) and 3
    mantissa bits."""
    exponent = code >> 3 & 15
    mantissa = code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


E4M3 = np.array([e4m3(code) for code in range(256)], np.float32)


def piece(name: str, tensor: Tensor) -> WeightPiece:
    return WeightPiece(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor)


def as_float8(codes: np.ndarray) -> Tensor:
    return torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)


class TestNVFP4(QuantizationContract):
    spec = MODELOPT
    block = 32
    config = {
        "quant_method": "modelopt",
        "producer": {"name": "modelopt", "version": "0.29"},
        "quantization": {
            "quant_algo": "NVFP4",
            "group_size": 16,
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"],
        },
    }

    def method(self, setup: QuantizationSetup) -> ModelOpt:
        return ModelOpt(None, setup)

    def tensors(
        self, rng: np.random.Generator, rows: int, columns: int
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        codes = rng.integers(0, 16, (rows, columns))
        scales = rng.integers(1, 120, (rows, columns // 16))
        whole = np.float32(rng.random() * 0.01)
        packed = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
        tensors = {
            "weight": packed,
            "weight_scale": as_float8(scales),
            "weight_scale_2": torch.tensor(whole),
        }
        return tensors, FP4[codes] * (E4M3[scales] * whole).repeat(16, 1)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        if part.name.startswith("model.embed"):
            return [WeightPiece(part.name, dtype, tuple(values.shape), values)], values.to(
                getattr(torch, dtype)
            ).float()
        rng = np.random.default_rng(abs(int(values[0, 0] * 1e6)))
        tensors, true = self.tensors(rng, *values.shape)
        module = part.name.removesuffix(".weight")
        return [
            piece(f"{module}.{name}", tensor) for name, tensor in tensors.items()
        ], torch.from_numpy(true).to(getattr(torch, dtype)).float()

    def test_weights_stay_packed_and_are_exact(self) -> None:
        layer = self.layer((5,), self.block * 2)
        weight = self.linear(layer)
        matrix = self.fill(weight, layer, 1)
        assert type(weight.weight()) is CodeWeight and torch.equal(weight.dequantize(), matrix)


class TestNVFP4AWQ(TestNVFP4):
    undivided = frozenset({"columns"})
    config = {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "NVFP4_AWQ", "group_size": 16},
    }

    def tensors(
        self, rng: np.random.Generator, rows: int, columns: int
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        tensors, true = super().tensors(rng, rows, columns)
        scale = torch.arange(1, columns + 1) / 8  # the parts of a merged weight have the same
        return tensors | {
            "pre_quant_scale": scale.bfloat16()
        }, true * scale.bfloat16().float().numpy()

    def test_weights_stay_packed_and_are_exact(self) -> None:
        layer = self.layer((5, 3), self.block * 2)
        weight = self.linear(layer)
        matrix = self.fill(weight, layer, 1)
        assert [type(span.op) for span in weight.spans] == [CodeWeight] and torch.equal(
            weight.dequantize(), matrix
        )


class TestW4A8AWQ(TestNVFP4AWQ):
    """weight_scale_2 has no effect: it is for rounding the weights to float8 when they are
    multiplied."""

    undivided = frozenset({"columns"})
    config = {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "W4A8_AWQ", "group_size": 32, "has_zero_point": False},
    }
    row_block = 2

    def tensors(
        self, rng: np.random.Generator, rows: int, columns: int
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        codes = rng.integers(-8, 8, (rows, columns))
        scales = rng.random((rows, columns // 32)).astype(np.float16)
        packed = torch.from_numpy((codes[::2] & 15 | (codes[1::2] & 15) << 4).astype(np.uint8))
        before = torch.arange(1, columns + 1) / 8
        tensors = {
            "weight": packed,
            "weight_scale": torch.from_numpy(scales).float(),
            "pre_quant_scale": before,
        }
        true = codes * scales.astype(np.float32).repeat(32, 1) * before.numpy()
        return tensors | {"weight_scale_2": torch.tensor(0.25)}, true.astype(np.float32)

    def test_weights_stay_packed_and_are_exact(self) -> None:
        layer = self.layer((5, 3), self.block * 2)
        weight = self.linear(layer)
        matrix = self.fill(weight, layer, 1)
        assert [type(span.op) for span in weight.spans] == [BlockWeight] and torch.equal(
            weight.dequantize(), matrix
        )


@pytest.mark.parametrize("kind", [TestNVFP4AWQ, TestW4A8AWQ])
def test_layers_whose_norm_has_the_scale_have_no_pre_quant_scale(kind: type[TestNVFP4AWQ]) -> None:
    contract = kind()
    tensors, true = contract.tensors(np.random.default_rng(0), 4, 64)
    before = tensors.pop("pre_quant_scale").float()
    weight = contract.make().linear(LinearLayer("m", 64, 4, (Part("m.weight", (0, 4)),)))
    assert weight is not None
    load_pieces(weight, stored_pieces("m", tensors))
    torch.testing.assert_close(weight.dequantize() * before, torch.from_numpy(true))


class TestMXFP8(TestNVFP4):
    config = {"quant_method": "modelopt", "quant_algo": "mxfp8", "ignore": ["lm_head"]}

    def tensors(
        self, rng: np.random.Generator, rows: int, columns: int
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        codes = rng.integers(0, 127, (rows, columns)) | rng.integers(0, 2, (rows, columns)) << 7
        scales = rng.integers(110, 130, (rows, columns // 32))
        tensors = {
            "weight": as_float8(codes),
            "weight_scale": torch.from_numpy(scales.astype(np.uint8)),
        }
        return tensors, E4M3[codes] * (np.float32(2) ** (scales - 127)).astype(np.float32).repeat(
            32, 1
        )


class TestMXFP4(TestNVFP4):
    config = {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8", "group_size": 32}

    def tensors(
        self, rng: np.random.Generator, rows: int, columns: int
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        codes = rng.integers(0, 16, (rows, columns))
        scales = rng.integers(110, 130, (rows, columns // 32))
        packed = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
        tensors = {"weight": packed, "weight_scale": torch.from_numpy(scales.astype(np.uint8))}
        return tensors, FP4[codes] * (np.float32(2) ** (scales - 127)).astype(np.float32).repeat(
            32, 1
        )


class TestWeightOnlyMXFP4(TestMXFP4):
    """As nvidia-modelopt 0.47 names it."""

    config = {"quant_method": "modelopt", "quant_algo": "mxfp4", "ignore": ["lm_head"]}


class TestFP8(TestNVFP4):
    config = {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "FP8", "exclude_modules": None},
    }

    def tensors(
        self, rng: np.random.Generator, rows: int, columns: int
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        codes = rng.integers(0, 127, (rows, columns))
        scale = np.float32(rng.random())
        return {"weight": as_float8(codes), "weight_scale": torch.tensor(scale)}, E4M3[
            codes
        ] * scale


class TestBlocks(TestNVFP4):
    config = {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}

    def tensors(
        self, rng: np.random.Generator, rows: int, columns: int
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        codes = rng.integers(0, 127, (rows, columns))
        scale = rng.random((-(-rows // 128), -(-columns // 128)), np.float32)
        scales = scale.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
        return {"weight": as_float8(codes), "weight_scale": torch.from_numpy(scale)}, E4M3[
            codes
        ] * scales


def method(**config: Any) -> ModelOpt:
    return ModelOpt(
        None,
        QuantizationSetup({"quant_method": "modelopt", **config}, "float32", "cpu", REFERENCES),
    )


def linear(
    found: ModelOpt, module: str, rows: int = 4, columns: int = 64, is_head: bool = False
) -> Any:
    return found.linear(
        LinearLayer(module, columns, rows, (Part(f"{module}.weight", (0, rows)),), is_head)
    )


def load(weight: Any, module: str, tensors: dict[str, Tensor]) -> Tensor:
    pieces = [piece(f"{module}.{name}", tensor) for name, tensor in tensors.items()]
    weight.declare(
        {each.name: TensorEntry(each.name, each.shape, each.stored, "", 0, 0) for each in pieces}
    )
    for each in pieces:
        weight.accept(each)
    weight.finish()
    return weight.dequantize()


def test_the_scale_of_a_single_block_has_no_dimensions() -> None:
    tensors, true = TestBlocks().tensors(np.random.default_rng(0), 64, 128)
    tensors["weight_scale"] = tensors["weight_scale"].squeeze()
    assert torch.equal(
        load(linear(method(quant_algo="fp8_pb_wo"), "m", 64, 128), "m", tensors),
        torch.from_numpy(true),
    )


def test_scales_of_blocks_with_four_dimensions_and_of_rows() -> None:
    rng = np.random.default_rng(0)
    tensors, true = TestBlocks().tensors(rng, 200, 160)
    tensors["weight_scale"] = tensors["weight_scale"].view(2, 1, 2, 1)
    assert torch.equal(
        load(linear(method(quant_algo="FP8_PB_WO"), "m", 200, 160), "m", tensors),
        torch.from_numpy(true),
    )
    codes = rng.integers(0, 127, (4, 64))
    scale = rng.random(4, np.float32)
    tensors = {"weight": as_float8(codes), "weight_scale": torch.from_numpy(scale)}
    found = load(linear(method(quant_algo="FP8_PER_CHANNEL_PER_TOKEN"), "m"), "m", tensors)
    assert torch.equal(found, torch.from_numpy(E4M3[codes] * scale[:, None]))


def test_what_is_not_quantized() -> None:
    found = method(
        quantization={
            "quant_algo": "FP8",
            "exclude_modules": ["lm_head", "model.layers.0.*", "*router"],
        }
    )
    for module in ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.7.router"):
        assert linear(found, module, is_head=module == "lm_head") is None
    assert linear(found, "model.layers.1.mlp.up_proj") is not None
    values = torch.randn(4, 64).bfloat16()  # a head that no list names
    assert torch.equal(
        load(
            linear(method(quant_algo="FP8"), "lm_head", is_head=True), "lm_head", {"weight": values}
        ),
        values.float(),
    )


def test_mixed_precision() -> None:
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}}
    found = method(quantization={"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    rng = np.random.default_rng(1)
    for module, contract in (("a", TestFP8()), ("b", TestNVFP4())):
        tensors, true = contract.tensors(rng, 4, 64)
        assert torch.equal(load(linear(found, module), module, tensors), torch.from_numpy(true))
    assert linear(found, "c") is None


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "quant_algo=None; ModelOpt supports 'FP8'"),
        ({"quant_algo": "W8A8_SQ"}, "quant_algo='W8A8_SQ'; ModelOpt supports"),
        ({"quantization": {"quant_algo": 4}}, "quantization.quant_algo=4"),
        (
            {"quantization": {"quant_algo": "NVFP4", "group_size": 32}},
            "quantization.group_size=32; ModelOpt supports 16",
        ),
        ({"quantization": ["FP8"]}, "needs an object"),
        (
            {"quant_algo": "FP8", "ignore": "lm_head"},
            "ignore='lm_head'; ModelOpt needs a list of texts",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "INT4"}}},
            "quantized_layers.a.b.quant_algo='INT4'",
        ),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 4}}, "quantized_layers.a=4"),
    ],
)
def test_odd_configs_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        method(**config)


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        (
            "weight",
            torch.zeros(4, 32, dtype=torch.int8),
            "m.weight is stored as int8; this format needs uint8",
        ),
        (
            "weight",
            torch.zeros(4, 64, dtype=torch.uint8),
            r"m.weight has shape \(4, 64\); m expects \(4, 32\)",
        ),
        (
            "weight_scale",
            torch.ones(4, 4),
            "m.weight_scale is stored as float32; this format needs float8_e4m3fn",
        ),
        (
            "weight_scale",
            torch.ones(4, 2).to(torch.float8_e4m3fn),
            r"m.weight_scale has shape \(4, 2\); m expects \(4, 4\)",
        ),
        (
            "weight_scale_2",
            torch.tensor(1),
            "m.weight_scale_2 is stored as int64; this format needs floats",
        ),
        ("weight_scale_2", None, "did not contain m.weight_scale_2"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, tensor: Tensor | None, told: str) -> None:
    tensors, _ = TestNVFP4().tensors(np.random.default_rng(0), 4, 64)
    changed = {**tensors, name: tensor}
    with pytest.raises(ModelError, match=told):
        load(
            linear(method(quant_algo="NVFP4"), "m"),
            "m",
            {key: value for key, value in changed.items() if value is not None},
        )


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("FP8", AskedRounding("float8_e4m3fn", is_static=True)),
        ("fp8_per_channel_per_token", AskedRounding("float8_e4m3fn")),
        ("FP8_PB_WO", AskedRounding("float8_e4m3fn", 128)),
        ("NVFP4", None),
        ("W4A16_AWQ", None),
    ],
)
def test_how_activations_are_rounded(algorithm: str, expected: AskedRounding | None) -> None:
    """Also if other modules have another algorithm."""
    layers = {"a": {"quant_algo": algorithm}, "b": {"quant_algo": "NVFP4"}}
    layer = LinearLayer("a", 64, 8, (Part("a.weight", (0, 8)),))
    for config in (
        {"quant_algo": algorithm},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers},
    ):
        setup = QuantizationSetup(config, "float32", "cpu", REFERENCES, rounding="checkpoint")
        found = ModelOpt(None, setup)
        assert found.rounding("a", layer) == expected
        if "quantized_layers" in config:
            assert found.rounding("b", layer) is None and found.rounding("c", layer) is None
