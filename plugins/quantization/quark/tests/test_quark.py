"""Quark weights, which the tests write as the format defines them, with numpy."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from pegboard_quantization_quark.format import Quark
from pegboard_quantization_quark.plugin import QUARK
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.ops import REFERENCES
from pegboard.ops.blocks import BlockWeight
from pegboard.ops.float_codes import CodeWeight
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import QuantizationContract, load_pieces, stored_pieces
from pegboard_testing.layouts import FP4, bit_stream, nibble_pairs
from pegboard_weights.asked_rounding import AskedRounding
from pegboard_weights.small_floats import FloatReader

INT8 = {
    "dtype": "int8",
    "qscheme": "per_channel",
    "symmetric": True,
    "ch_axis": 0,
    "is_dynamic": False,
}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}


def fp6(exponent_bits: int) -> np.ndarray:
    """Return what the 64 codes of FP6 stand for: a sign, an exponent and a mantissa, without
    infinities."""
    size = 1 << (5 - exponent_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    found = []
    for code in range(64):
        exponent = code >> (5 - exponent_bits) & ((1 << exponent_bits) - 1)
        mantissa = code % size
        value = (
            mantissa / size * 2.0 ** (1 - bias)
            if exponent == 0
            else (1 + mantissa / size) * 2.0 ** (exponent - bias)
        )
        found.append(-value if code & 32 else value)
    return np.array(found, np.float32)


def test_contract() -> None:
    check_entry(installed_entry("quantization", "quark"))


class TestInt8(QuantizationContract):
    spec = QUARK
    weight: dict[str, Any] = INT8
    block = 32

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        return {
            "quant_method": "quark",
            "global_quant_config": {"weight": self.weight},
            "exclude": [],
            "export": {},
        }

    def method(self, setup: QuantizationSetup) -> Quark:
        return Quark(None, setup)

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
        if self.weight["dtype"].startswith("fp6"):
            codes = rng.integers(0, 64, (rows, columns))
            exponents = rng.integers(120, 130, (rows, columns // 32)).astype(np.uint8)
            stream = bit_stream(codes.T, 6).T.contiguous().view(torch.uint8)
            values = fp6(3 if self.weight["dtype"] == "fp6_e3m2" else 2)[codes]
            tensors = {"weight": stream, "weight_scale": torch.from_numpy(exponents)}
            return tensors, values * (2.0 ** (exponents.astype(np.float32) - 127)).repeat(32, 1)
        if self.weight["dtype"] == "fp4":
            codes = rng.integers(0, 16, (rows, columns))
            exponents = rng.integers(120, 130, (rows, columns // 32)).astype(np.uint8)
            tensors = {"weight": nibble_pairs(codes), "weight_scale": torch.from_numpy(exponents)}
            return tensors, FP4[codes] * (2.0 ** (exponents.astype(np.float32) - 127)).repeat(32, 1)
        size = rows if self.weight["qscheme"] == "per_channel" else 1
        scale = rng.random(size).astype(np.float32)
        tensors = {"weight_scale": torch.from_numpy(scale)}
        if self.weight["dtype"] == "fp8_e4m3":
            floats = torch.from_numpy(values).to(torch.float8_e4m3fn)
            return tensors | {"weight": floats}, floats.float().numpy() * scale[:, None]
        codes = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
        zeros = rng.integers(-128, 128, size).astype(np.int8) * (not self.weight["symmetric"])
        tensors |= {
            "weight": torch.from_numpy(codes),
            "weight_zero_point": torch.from_numpy(zeros.astype(np.int8)),
        }
        return tensors, (codes.astype(np.int32) - zeros[:, None]) * scale[:, None]


class TestInt8WithZeros(TestInt8):
    weight = {**INT8, "symmetric": False}


class TestFloat8(TestInt8):
    weight = FP8


class TestMXFP4(TestInt8):
    weight = MXFP4


class TestMXFP6(TestInt8):
    weight = {**MXFP4, "dtype": "fp6_e3m2"}


class TestMXFP6WithThreeBitsOfMantissa(TestInt8):
    weight = {**MXFP4, "dtype": "fp6_e2m3"}


def load(contract: TestInt8, tensors: dict[str, Tensor], rows: int, columns: int) -> Any:
    weight = contract.linear(contract.layer((rows,), columns))
    load_pieces(weight, stored_pieces("model.part0", tensors))
    return weight


@pytest.mark.parametrize(
    ("weight", "held"),
    [
        (INT8, BlockWeight),
        ({**INT8, "symmetric": False}, BlockWeight),
        ({**INT8, "qscheme": "per_tensor", "symmetric": False}, BlockWeight),
        ({**FP8, "qscheme": "per_channel"}, CodeWeight),
        (MXFP4, CodeWeight),
    ],
)
def test_weights_mean_the_stored_values_and_stay_packed(weight: dict[str, Any], held: type) -> None:
    contract = TestInt8()
    contract.weight = weight
    tensors, true = contract.tensors(
        np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32),
        np.random.default_rng(2),
    )
    found = load(contract, tensors, 5, 64)
    assert type(found.weight()) is held
    assert torch.equal(found.dequantize(), torch.from_numpy(true.astype(np.float32)))


def method(**config: Any) -> Quark:
    config = {"quant_method": "quark", "global_quant_config": {"weight": INT8}, **config}
    return Quark(None, QuantizationSetup(config, "float32", "cpu", REFERENCES))


def type_of(found: Quark, module: str) -> str | None:
    weight = found.linear(LinearLayer(module, 64, 8, (Part(f"{module}.weight", (0, 8)),)))
    if weight is None:
        return None
    [reader] = weight.readers.values()
    if isinstance(reader, FloatReader):
        return "fp4" if reader.bits == 4 else "fp8_e4m3"
    return "int8"


def test_which_modules_have_which_scheme() -> None:
    layers = {
        "*.down_proj": {"weight": FP8},
        "model.layers.1.*": {"weight": MXFP4},
        "*.gate": {"weight": None},
    }
    found = method(layer_quant_config=layers, exclude=["lm_head", "*visual*", r"re:.*\.9\."])
    assert type_of(found, "model.layers.0.up_proj") == "int8"
    assert type_of(found, "model.layers.1.down_proj") == "fp8_e4m3"
    assert type_of(found, "model.layers.1.up_proj") == "fp4"
    for plain in (
        "lm_head",
        "model.visual.up_proj",
        "model.layers.9.up_proj",
        "model.layers.0.gate",
    ):
        assert type_of(found, plain) is None
    assert found.embedding(EmbeddingLayer("embed", 8, 64, Part("embed.weight", (0, 8)))) is None


def test_the_log_says_that_activations_are_not_quantized(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    method(global_quant_config={"weight": INT8, "input_tensors": {"dtype": "int4"}})
    [record] = caplog.records
    assert "activations are not quantized" in record.getMessage()


def test_scales_of_the_kv_cache_do_not_choose_its_type() -> None:
    """As in vLLM. They are used with `--kv-cache-dtype fp8`."""
    assert method(export={"kv_cache_group": ["*k_proj", "*v_proj"]}).kv_cache(None) is None


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"global_quant_config": None}, "global_quant_config=None; Quark needs an object"),
        (
            {"global_quant_config": {"weight": {**INT8, "dtype": "int3"}}},
            "weight.dtype='int3'; Quark supports",
        ),
        (
            {"global_quant_config": {"weight": {**INT8, "qscheme": "per_group"}}},
            "qscheme='per_group'; Quark supports",
        ),
        (
            {"global_quant_config": {"weight": {**MXFP4, "group_size": 16}}},
            "group_size=16; Quark supports 32",
        ),
        (
            {"global_quant_config": {"weight": [FP8, INT8]}},
            "Quark does not support weights that were quantized twice",
        ),
        (
            {"layer_quant_config": {"a": {"weight": "x"}}},
            "layer_quant_config.a.weight='x'; Quark needs an object",
        ),
        (
            {"layer_type_quant_config": {"Linear": {}}},
            "layer_type_quant_config=.*does not support schemes of layer types",
        ),
        ({"exclude": "lm_head"}, "exclude='lm_head'; Quark needs a list of texts"),
    ],
)
def test_odd_configs_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        method(**config)


@pytest.mark.parametrize(
    ("weight", "name", "value", "told"),
    [
        (INT8, "weight_scale", None, "did not contain model.part0.weight_scale"),
        (INT8, "weight_scale", torch.ones(2), r"weight_scale has shape \(2,\)"),
        (INT8, "weight", torch.zeros(3, 64), "weight is stored as float32; this format needs int8"),
        (FP8, "weight", torch.zeros(3, 63).to(torch.float8_e4m3fn), r"weight has shape \(3, 63\)"),
        (
            MXFP4,
            "weight_scale",
            torch.ones(3, 2),
            "weight_scale is stored as float32; this format needs float8_e8m0fnu or",
        ),
    ],
)
def test_broken_tensors_are_refused_by_name(
    weight: dict[str, Any], name: str, value: Tensor | None, told: str
) -> None:
    contract = TestInt8()
    contract.weight = weight
    tensors, _ = contract.tensors(np.zeros((3, 64), np.float32), np.random.default_rng(0))
    with pytest.raises(ModelError, match=told):
        load(
            contract,
            {
                key: data
                for key, data in (tensors | {name: value}).items()
                if isinstance(data, Tensor)
            },
            3,
            64,
        )


TENSOR = {"qscheme": "per_tensor"}
TOKEN = {"qscheme": "per_channel", "is_dynamic": True}


@pytest.mark.parametrize(
    ("kind", "inputs", "expected"),
    [
        ("int8", TENSOR, AskedRounding("int8", is_static=True)),
        (
            "int8",
            {**TENSOR, "symmetric": False},
            AskedRounding("int8", is_static=True, is_symmetric=False),
        ),
        ("int8", TOKEN, AskedRounding("int8")),
        ("int8", {**TENSOR, "is_dynamic": True}, AskedRounding("int8", is_shared=True)),
        ("int8", {"qscheme": "per_channel"}, None),
        ("int8", {**TOKEN, "qscheme": "per_group"}, None),
        ("int8", {**TOKEN, "dtype": "fp8_e4m3"}, None),
        ("fp8_e4m3", TENSOR, AskedRounding("float8_e4m3fn", is_static=True)),
        ("fp8_e4m3", TOKEN, AskedRounding("float8_e4m3fn")),
    ],
)
def test_how_activations_are_rounded(
    kind: str, inputs: dict[str, Any], expected: AskedRounding | None
) -> None:
    """Excluded modules have no weights that would be multiplied so."""
    scheme = {
        "weight": {"dtype": kind, "qscheme": "per_channel"},
        "input_tensors": {"dtype": kind, **inputs},
    }
    setup = QuantizationSetup(
        {"global_quant_config": scheme, "layer_quant_config": {"*plain": {}}},
        "float32",
        "cpu",
        REFERENCES,
        rounding="checkpoint",
    )
    layer = LinearLayer("a", 64, 8, (Part("a.weight", (0, 8)),))
    found = Quark(None, setup)
    assert found.rounding("a", layer) == expected
    assert found.rounding("model.plain", layer) is None
