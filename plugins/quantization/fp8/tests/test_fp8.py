"""FP8 weights, which the tests write as the format defines them, and plain weights that are
rounded."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from pegboard_quantization_fp8.method import FP8
from pegboard_quantization_fp8.online import DeepSpeedFP
from pegboard_quantization_fp8.plugin import DEEPSPEED_FP
from pegboard_quantization_fp8.plugin import FP8 as SPEC
from torch import Tensor

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import TensorEntry, WeightPiece
from pegboard.ops import REFERENCES
from pegboard.ops.float_codes import CodeWeight
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import QuantizationContract


@pytest.mark.parametrize(
    "name", ["fp8", "ptpc_fp8", "fbgemm_fp8", "fp8_per_channel", "deepspeedfp"]
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


class TestPerTensor(QuantizationContract):
    spec = SPEC
    block = 64
    config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    scale_name = "weight_scale"

    def method(self, setup: QuantizationSetup) -> FP8:
        return FP8(None, setup)

    def scale(
        self, rng: np.random.Generator, rows: int, columns: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the scales as they are stored, and one for every element."""
        scale = rng.random((), np.float32)
        return scale, np.broadcast_to(scale, (rows, columns))

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        compute = getattr(torch, dtype)
        if part.name.startswith("model.embed"):
            return [WeightPiece(part.name, dtype, tuple(values.shape), values)], values.to(
                compute
            ).float()
        rows, columns = values.shape
        rng = np.random.default_rng(abs(int(values[0, 0] * 1e6)))
        codes = (
            rng.integers(0, 127, (rows, columns)).astype(np.uint8)
            | rng.integers(0, 2, (rows, columns)).astype(np.uint8) << 7
        )
        stored, scales = self.scale(rng, rows, columns)
        weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        scale = piece(
            part.name.replace("weight", self.scale_name), torch.from_numpy(np.asarray(stored))
        )
        return [piece(part.name, weight), scale], torch.from_numpy(E4M3[codes] * scales).to(
            compute
        ).float()

    def test_weights_stay_packed(self) -> None:
        layer = self.layer((2,), self.block)
        weight = self.linear(layer)
        self.fill(weight, layer, 1)
        assert type(weight.weight()) is CodeWeight


class TestBlocks(TestPerTensor):
    """As DeepSeek V3 stores them. The contract's parts end within blocks of rows, and its columns
    within blocks of columns."""

    cut_block = 128
    config = {"quant_method": "fp8", "weight_block_size": [4, 128], "fmt": "e4m3"}
    scale_name = "weight_scale_inv"

    def scale(
        self, rng: np.random.Generator, rows: int, columns: int
    ) -> tuple[np.ndarray, np.ndarray]:
        scale = rng.random((math.ceil(rows / 4), math.ceil(columns / 128)), np.float32)
        return scale, scale.repeat(4, 0)[:rows].repeat(128, 1)[:, :columns]


class TestRows(TestPerTensor):
    """As fbgemm_fp8 stores them. The shape of the scales tells, so the checkpoint's entries are
    needed."""

    config = {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": None,
    }

    def scale(
        self, rng: np.random.Generator, rows: int, columns: int
    ) -> tuple[np.ndarray, np.ndarray]:
        scale = rng.random((rows, 1), np.float32)
        return scale, np.broadcast_to(scale, (rows, columns))

    def fill(self, weight: Any, layer: LinearLayer, seed: int, dtype: str = "float32") -> Tensor:
        declare = weight.declare
        names = [(part.name, part.rows[1] - part.rows[0]) for part in layer.parts]
        entries = [entry(name.replace("weight", "weight_scale"), (rows, 1)) for name, rows in names]
        weight.declare = lambda available: declare({each.name: each for each in entries})
        return super().fill(weight, layer, seed, dtype)


def entry(name: str, shape: tuple[int, ...], stored: str = "float32") -> TensorEntry:
    return TensorEntry(name, shape, stored, "model.safetensors", 0, 0)


def setup(**config: Any) -> QuantizationSetup:
    return QuantizationSetup(config, "float32", "cpu", REFERENCES)


def layer(rows: int, columns: int) -> LinearLayer:
    return LinearLayer("m", columns, rows, (Part("m.weight", (0, rows)),))


def loaded(weight: Any, pieces: list[WeightPiece]) -> Tensor:
    weight.declare({each.name: entry(each.name, each.shape, each.stored) for each in pieces})
    for each in pieces:
        weight.accept(each)
    weight.finish()
    return weight.dequantize()


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the nearest entry for each value; of two, the one with the even index."""
    far = np.abs(values[..., None].astype(np.float64) - table)
    even_first = np.concatenate((np.arange(0, len(table), 2), np.arange(1, len(table), 2)))
    return table[even_first[far[..., even_first].argmin(-1)]]


class TestOnline(QuantizationContract):
    spec = SPEC
    block = 32

    def method(self, setup: QuantizationSetup) -> Any:
        return FP8(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        values = values.bfloat16()
        compute = getattr(torch, dtype)
        if part.name.startswith("model.embed"):
            return [piece(part.name, values)], values.to(compute).float()
        scale = (values.float().abs().amax(1, keepdim=True) / 448).numpy()
        finite = np.where(np.abs(E4M3) <= 448, E4M3, np.inf)
        true = nearest(values.float().numpy() / scale, finite) * scale
        return [piece(part.name, values)], torch.from_numpy(true).to(compute).float()


class TestDeepSpeedSixBits(TestOnline):
    spec = DEEPSPEED_FP
    config = {"quant_method": "deepspeedfp", "bits": 6, "group_size": 32}

    def method(self, setup: QuantizationSetup) -> Any:
        return DeepSpeedFP(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        if part.name.startswith("model.embed"):
            return super().stored(part, values, dtype)
        small = [m / 4 * 2.0**-2 for m in range(4)] + [
            (1 + m / 4) * 2.0 ** (e - 3) for e in range(1, 8) for m in range(4)
        ]
        table = np.array(small + [-each for each in small], np.float32)
        groups = values.numpy().reshape(len(values), -1, 32)
        scale = np.abs(groups).max(2, keepdims=True) / np.float32(28)
        true = (nearest(groups / scale, table) * scale).reshape(values.shape)
        return [piece(part.name, values)], torch.from_numpy(true).to(getattr(torch, dtype)).float()


def test_what_is_not_quantized() -> None:
    part = Part("lm_head.weight", (0, 8))
    for method in (
        FP8(None, setup()),
        FP8(None, setup(quant_method="fp8", ignored_layers=["mlp.gate"])),
    ):
        assert method.embedding(EmbeddingLayer("embed", 8, 128, part)) is None
        assert method.linear(LinearLayer("lm_head", 128, 8, (part,), is_head=True)) is None
        assert method.linear(layer(8, 128)) is not None
    assert (
        method.linear(LinearLayer("mlp.gate", 128, 8, (Part("mlp.gate.weight", (0, 8)),))) is None
    )


def test_a_module_without_scales_is_plain() -> None:
    """A router that no list names."""
    values = torch.randn(8, 64).bfloat16()
    weight = FP8(None, setup(quant_method="fp8")).linear(layer(8, 64))
    assert torch.equal(loaded(weight, [piece("m.weight", values)]), values.float())


@pytest.mark.parametrize("kind", ["float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_other_float8_types(kind: str) -> None:
    codes = torch.arange(64, dtype=torch.uint8).view(2, 32).view(getattr(torch, kind))
    weight = FP8(None, setup(quant_method="fp8")).linear(layer(2, 32))
    found = loaded(weight, [piece("m.weight", codes), piece("m.weight_scale", torch.tensor([0.5]))])
    assert torch.equal(found, codes.float() * 0.5)


def test_that_activations_are_not_quantized_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        method = FP8(None, setup(quant_method="fp8", activation_scheme="static"))
        method.linear(layer(8, 64)), method.linear(layer(8, 64))
        FP8(None, setup())
    assert sum("activations are not rounded" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"activation_scheme": "per_token"},
            "activation_scheme='per_token'; FP8 supports 'dynamic', 'static'",
        ),
        ({"weight_block_size": 128}, "weight_block_size=128; FP8 needs two positive numbers"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\]"),
        ({"weight_block_size": [128, True]}, "weight_block_size"),
        ({"weight_block_size": []}, "weight_block_size"),
        ({"fmt": "e3m4"}, "fmt='e3m4'; FP8 supports 'e4m3'"),
        ({"ignored_layers": "lm_head"}, "ignored_layers='lm_head'; FP8 needs a list of texts"),
    ],
)
def test_odd_configs_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        FP8(None, setup(quant_method="fp8", **config))


@pytest.mark.parametrize(
    ("config", "told"),
    [({"bits": 12}, "bits=12; DeepSpeed FP supports 8, 6"), ({"group_size": 0}, "group_size=0")],
)
def test_odd_configs_of_deepspeed_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        DeepSpeedFP(None, setup(quant_method="deepspeedfp", **config))


def test_checkpoints_of_other_methods_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="already quantized \\('awq'\\), but FP8 needs plain weights or float8"
    ):
        FP8(None, setup(quant_method="awq"))


WEIGHT = torch.ones(8, 64).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (
            {"weight": WEIGHT.float(), "weight_scale": torch.tensor(1.0)},
            "m.weight is stored as float32; this format needs float8_e4m3fn or",
        ),
        (
            {"weight": WEIGHT, "weight_scale": torch.tensor(1)},
            "m.weight_scale is stored as int64; this format needs floats",
        ),
        ({"weight": WEIGHT, "weight_scale": torch.ones(7)}, r"m.weight_scale has shape \(7,\)"),
        ({"weight": WEIGHT}, "did not contain m.weight_scale"),
        (
            {"weight": WEIGHT[:, :32], "weight_scale": torch.tensor(1.0)},
            r"m.weight has shape \(8, 32\); m expects \(8, 64\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors: dict[str, Tensor], told: str) -> None:
    pieces = [piece(f"m.{name}", tensor) for name, tensor in tensors.items()]
    with pytest.raises(ModelError, match=told):
        loaded(FP8(None, setup(quant_method="fp8")).linear(layer(8, 64)), pieces)


def test_plain_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ModelError, match="m.weight has values that are not finite"):
        loaded(
            FP8(None, setup()).linear(layer(8, 64)),
            [piece("m.weight", torch.full((8, 64), float("inf")))],
        )


def test_a_row_of_zeros_stays_zero() -> None:
    values = torch.randn(4, 32)
    values[1] = 0
    found = loaded(FP8(None, setup()).linear(layer(4, 32)), [piece("m.weight", values)])
    assert not found[1].any() and found[0].any()
