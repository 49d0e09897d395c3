"""torchao weights, which the tests write as the format defines them, with numpy."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from pegboard_quantization_torchao.format import TorchAO
from pegboard_quantization_torchao.plugin import TORCHAO
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import LinearLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.ops import REFERENCES
from pegboard.ops.blocks import BlockWeight
from pegboard.ops.float_codes import CodeWeight
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import QuantizationContract, load_pieces, stored_pieces
from pegboard_weights.asked_rounding import AskedRounding


def test_contract() -> None:
    check_entry(installed_entry("quantization", "torchao"))


def config_of(name: str) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_data": {}}}}


class TestInt8(QuantizationContract):
    spec = TORCHAO
    config = config_of("Int8WeightOnlyConfig")
    kind = "int8"
    size: tuple[int, int] | None = None
    """Rows and columns per scale; None = a row."""
    block = 32

    def method(self, setup: QuantizationSetup) -> TorchAO:
        return TorchAO(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        if part.name.startswith("model.embed"):
            return [WeightPiece(part.name, dtype, tuple(values.shape), values)], values.to(
                getattr(torch, dtype)
            ).float()
        tensors, true = self.tensors(
            values.numpy(), np.random.default_rng(abs(int(values[0, 0] * 1e6)))
        )
        exact = torch.from_numpy(true.astype(np.float32)).to(getattr(torch, dtype)).float()
        return self.pieces(part.name.removesuffix(".weight"), tensors), exact

    def pieces(self, module: str, tensors: dict[str, Tensor]) -> list[WeightPiece]:
        return stored_pieces(module, {f"_weight_{name}": data for name, data in tensors.items()})

    def tensors(
        self, values: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        rows, columns = values.shape
        height, width = self.size or (1, columns)
        shape = (rows // height, columns // width)
        scale = torch.from_numpy(rng.random(shape)).to(
            torch.float32 if self.kind == "float8" else torch.bfloat16
        )
        wide = scale.float().numpy().repeat(height, 0).repeat(width, 1)
        if self.kind == "float8":
            floats = torch.from_numpy(values).to(torch.float8_e4m3fn)
            return {"qdata": floats, "scale": scale}, floats.float().numpy() * wide
        if self.kind == "int4":
            codes = rng.integers(-8, 8, (rows, columns))
            offset = torch.from_numpy(rng.standard_normal(shape)).to(torch.bfloat16)
            packed = torch.from_numpy(
                (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).astype(np.uint8)
            ).view(torch.int8)
            tensors = {
                "qdata": packed,
                "scale": scale.T.contiguous(),
                "zero_point": offset.T.contiguous(),
            }
            return tensors, codes.astype(np.float32) * wide + offset.float().numpy().repeat(
                width, 1
            )
        half = 8 if self.kind == "intx" else 128
        codes = rng.integers(-half, half, (rows, columns)).astype(np.int8)
        codes[0, :2] = -half, half - 1
        tensors = {"qdata": torch.from_numpy(codes), "scale": scale}
        zeros = np.zeros(shape, np.int8)
        if self.kind == "intx":
            zeros = rng.integers(-half, half, shape).astype(np.int8)
            tensors["zero_point"] = torch.from_numpy(zeros)
        return tensors, (codes.astype(np.float32) - zeros.repeat(height, 0).repeat(width, 1)) * wide


class TestInt4(TestInt8):
    config = config_of("Int4WeightOnlyConfig")
    kind = "int4"
    size = (1, 32)


class TestIntx(TestInt8):
    config = config_of("IntxWeightOnlyConfig")
    kind = "intx"
    size = (1, 32)


class TestFloat8(TestInt8):
    config = config_of("Float8WeightOnlyConfig")
    kind = "float8"


def load(contract: TestInt8, tensors: dict[str, Tensor], rows: int, columns: int) -> Any:
    weight = contract.linear(contract.layer((rows,), columns))
    load_pieces(weight, contract.pieces("model.part0", tensors))
    return weight


@pytest.mark.parametrize(
    ("kind", "size", "held"),
    [
        ("int8", (6, 64), BlockWeight),
        ("int8", None, BlockWeight),
        ("intx", (1, 32), BlockWeight),
        ("intx", (2, 32), BlockWeight),
        ("int4", (1, 64), BlockWeight),
        ("float8", None, CodeWeight),
        ("float8", (6, 64), CodeWeight),
        ("float8", (2, 32), CodeWeight),
    ],
)
def test_weights_mean_the_stored_values_and_stay_packed(
    kind: str, size: tuple[int, int] | None, held: type
) -> None:
    contract = TestInt8()
    contract.kind = kind
    contract.size = size
    values = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)
    tensors, true = contract.tensors(values, np.random.default_rng(2))
    weight = load(contract, tensors, 6, 64)
    assert type(weight.weight()) is held
    torch.testing.assert_close(
        weight.dequantize(), torch.from_numpy(true.astype(np.float32)), rtol=1e-6, atol=1e-6
    )
    if size == (6, 64):  # one scale, stored without dimensions
        again = load(contract, tensors | {"scale": tensors["scale"].reshape(())}, 6, 64)
        assert torch.equal(again.dequantize(), weight.dequantize())


def test_modules_without_qdata_are_plain() -> None:
    contract = TestInt8()
    weight = contract.linear(contract.layer((3,), 32))
    pieces = stored_pieces("model.part0", {"weight": torch.randn(3, 32)})
    load_pieces(weight, pieces)
    assert torch.equal(weight.dequantize(), pieces[0].data)


@pytest.mark.parametrize("shape", [(64,), (1, 64)], ids=str)
def test_activations_are_scaled_before_the_product(shape: tuple[int, ...]) -> None:
    contract = TestInt4()
    values = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)
    tensors, true = contract.tensors(values, np.random.default_rng(2))
    before = torch.rand(64) + 0.5
    x = torch.randn(3, 64)
    weight = load(contract, {**tensors, "act_pre_scale": before.bfloat16().view(shape)}, 6, 64)
    expected = (x * before.bfloat16().float()) @ torch.from_numpy(true.astype(np.float32)).T
    torch.testing.assert_close(weight.bind(REFERENCES)(x), expected, rtol=1e-4, atol=1e-3)


def method(**config: Any) -> TorchAO:
    return TorchAO(
        None, QuantizationSetup({"quant_method": "torchao", **config}, "float32", "cpu", REFERENCES)
    )


def test_the_config(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    layer = LinearLayer("lm_head", 64, 8, (Part("lm_head.weight", (0, 8)),), is_head=True)
    assert method(modules_to_not_convert=["lm_head"]).linear(layer) is None
    assert not caplog.records
    method(quant_type={"default": {"_type": "Int4DynamicActivationInt4WeightConfig", "_data": {}}})
    [record] = caplog.records
    assert "activations are not quantized" in record.getMessage()
    with pytest.raises(ModelError, match="modules_to_not_convert=3; torchao needs a list of texts"):
        method(modules_to_not_convert=3)


@pytest.mark.parametrize(
    ("kind", "name", "value", "told"),
    [
        ("int8", "scale", None, "did not contain model.part0._weight_scale"),
        (
            "int8",
            "scale",
            torch.ones(4, 1),
            "_weight_scale has the shape .4, 1., which does not divide a weight of .3, 64.",
        ),
        (
            "int8",
            "scale",
            torch.ones(1, 1, 1),
            "_weight_scale has the shape .1, 1, 1., which does not divide",
        ),
        (
            "int8",
            "qdata",
            torch.zeros(1, 3, 4, 8, dtype=torch.int32),
            "Plain layouts are supported, and not those of",
        ),
        (
            "int8",
            "qdata",
            torch.zeros(3, 64, dtype=torch.int32),
            "_weight_qdata is stored as int32; this format needs int8 or",
        ),
        (
            "intx",
            "zero_point",
            torch.zeros(3, 4),
            "_weight_zero_point must have one whole number per scale",
        ),
        (
            "intx",
            "zero_point",
            torch.full((3, 2), 0.5),
            "_weight_zero_point must have one whole number per scale",
        ),
        ("int4", "zero_point", None, "_weight_qdata has the shape .3, 32. for a weight of .3, 64."),
        (
            "int4",
            "zero_point",
            torch.ones(2, 4),
            "_weight_zero_point needs the shape of the scales, .2, 3.",
        ),
        (
            "int4",
            "scale",
            torch.ones(3, 2),
            "_weight_scale has the shape .3, 2.; a weight of .3, 64. needs .groups, 3.",
        ),
    ],
)
def test_broken_tensors_are_refused_by_name(
    kind: str, name: str, value: Tensor | None, told: str
) -> None:
    contract = TestInt8()
    contract.kind = kind
    contract.size = (1, 32)
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


def test_a_reload_uses_as_many_bits_as_the_first_load() -> None:
    contract = TestInt8()
    contract.kind = "intx"
    contract.size = (1, 32)
    tensors, _ = contract.tensors(np.zeros((3, 64), np.float32), np.random.default_rng(0))
    weight = load(contract, tensors, 3, 64)
    tensors["qdata"][1, 1] = 100
    for piece in contract.pieces("model.part0", tensors):
        weight.accept(piece)
    with pytest.raises(ModelError, match="do not fit into 4 bits, as it had before"):
        weight.finish()


FLOAT8 = "Float8DynamicActivationFloat8WeightConfig"
INTX = "Int8DynamicActivationIntxWeightConfig"


def config_of(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": 2, "_data": data}


@pytest.mark.parametrize(
    ("quant_type", "expected"),
    [
        (config_of("Int8DynamicActivationInt8WeightConfig"), AskedRounding("int8")),
        ("int8_dynamic_activation_int8_weight", AskedRounding("int8")),
        (config_of(INTX), AskedRounding("int8", is_symmetric=False)),
        (
            config_of(INTX, act_mapping_type={"_type": "MappingType", "_data": "SYMMETRIC"}),
            AskedRounding("int8"),
        ),
        (config_of(INTX, act_mapping_type={"_type": "MappingType", "_data": "OTHER"}), None),
        (config_of(FLOAT8), AskedRounding("float8_e4m3fn", is_shared=True)),
        (config_of(FLOAT8, granularity=config_of("PerRow")), AskedRounding("float8_e4m3fn")),
        (
            config_of(FLOAT8, granularity=[config_of("PerRow"), config_of("PerTensor")]),
            AskedRounding("float8_e4m3fn"),
        ),
        (config_of(FLOAT8, granularity=config_of("PerBlock")), None),
        (
            config_of("Float8DynamicActivationInt4WeightConfig"),
            AskedRounding("float8_e4m3fn"),
        ),
        (config_of("Int8WeightOnlyConfig"), None),
        (None, None),
    ],
)
def test_how_activations_are_rounded(quant_type: object, expected: AskedRounding | None) -> None:
    setup = QuantizationSetup(
        {"quant_type": {"default": quant_type}}, "float32", "cpu", REFERENCES, rounding="checkpoint"
    )
    layer = LinearLayer("a", 64, 8, (Part("a.weight", (0, 8)),))
    assert TorchAO(None, setup).rounding("a", layer) == expected


@pytest.mark.parametrize("name", ["fqn_to_config", "module_fqn_to_config"])
def test_modules_have_configs_of_their_own(name: str) -> None:
    """Their path counts before a regular expression, and that before the default."""
    of_modules = {
        "_default": config_of("Int8DynamicActivationInt8WeightConfig"),
        "re:model.*": config_of(INTX),
        "model.a": None,
    }
    quant_type = {"default": config_of("FqnToConfig", **{name: of_modules})}
    setup = QuantizationSetup(
        {"quant_type": quant_type}, "float32", "cpu", REFERENCES, rounding="checkpoint"
    )
    layer = LinearLayer("a", 64, 8, (Part("a.weight", (0, 8)),))
    found = TorchAO(None, setup)
    assert found.rounding("model.a", layer) is None
    assert found.rounding("model.b", layer) == AskedRounding("int8", is_symmetric=False)
    assert found.rounding("other", layer) == AskedRounding("int8")
