"""HQQ weights, which the tests write as the format defines them, with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pegboard_quantization_hqq.format import HQQ, _scheme
from pegboard_quantization_hqq.plugin import HQQ as SPEC
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.ops import REFERENCES
from pegboard.ops.blocks import BlockWeight
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import QuantizationContract, load_pieces, stored_pieces
from pegboard_weights.config import QuantConfig


def test_contract() -> None:
    check_entry(installed_entry("quantization", "hqq"))


def packed(codes: np.ndarray, bits: int) -> Tensor:
    """Put slices of the matrix above each other into bytes, or into words for 3 bits; the first
    slice in the highest bits."""
    slices = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
    height = -(-len(codes) // slices)
    padded = np.zeros((height * slices, codes.shape[1]), np.int64)
    padded[: len(codes)] = codes
    found = sum(
        padded[i * height : (i + 1) * height] << bits * (slices - 1 - i) for i in range(slices)
    )
    return torch.from_numpy(np.asarray(found).astype(np.int32 if bits == 3 else np.uint8))


class TestHQQ(QuantizationContract):
    spec = SPEC
    bits = 4
    group_size: int | None = 64
    axis = 1
    has_whole_zeros = False
    prefix = ""
    block = 64
    row_block = 2
    """A byte holds two slices of the matrix."""

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        weight = {
            "nbits": self.bits,
            "group_size": self.group_size,
            "axis": self.axis,
            "channel_wise": True,
            "optimize": True,
        }
        quant = {
            "weight_quant_params": weight,
            "scale_quant_params": None,
            "zero_quant_params": None,
            "offload_meta": False,
        }
        return {"quant_method": "hqq", "quant_config": quant, "skip_modules": ["lm_head"]}

    def method(self, setup: QuantizationSetup) -> HQQ:
        return HQQ(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        tensors, true = self.tensors(
            tuple(values.shape), np.random.default_rng(abs(int(values[0, 0] * 1e6)))
        )
        return stored_pieces(part.name.removesuffix(".weight"), tensors), torch.from_numpy(true).to(
            getattr(torch, dtype)
        ).float()

    def tensors(
        self, shape: tuple[int, ...], rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        num = shape[0] * shape[1]
        size = self.group_size
        if size is not None:
            shape_of_codes = (num // size, size) if self.axis == 1 else (size, num // size)
        else:
            shape_of_codes = (shape[0], shape[1])
        of_scales = (shape_of_codes[0], 1) if self.axis == 1 else (1, shape_of_codes[1])
        codes = rng.integers(0, 2**self.bits, shape_of_codes)
        scale = (rng.random(of_scales) * 0.1).astype(np.float16)
        zero = (rng.random(of_scales) * 2**self.bits).astype(np.float16)
        zero = zero.round() if self.has_whole_zeros else zero
        name = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}[self.bits]
        meta = {
            "scale": scale,
            "zero": zero,
            "packing": np.frombuffer(name.encode(), np.uint8).copy(),
        }
        tensors = {"W_q": packed(codes, self.bits)} | {
            f"{self.prefix}{key}": torch.from_numpy(data) for key, data in meta.items()
        }
        return tensors, ((codes - zero.astype(np.float32)) * scale.astype(np.float32)).astype(
            np.float32
        ).reshape(shape)


class TestWholeZeros(TestHQQ):
    has_whole_zeros = True


class TestEightBits(TestHQQ):
    bits = 8


class TestTwoBits(TestHQQ):
    bits = 2
    row_block = 4


class TestGroupsOfRows(TestHQQ):
    axis = 0


def load(contract: TestHQQ, tensors: dict[str, Tensor], rows: int, columns: int) -> Any:
    layer = LinearLayer("model.merged", columns, rows, (Part("model.part0.weight", (0, rows)),))
    weight = contract.linear(layer)
    load_pieces(weight, stored_pieces("model.part0", tensors))
    return weight


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("axis", "group_size", "columns", "stays_packed"),
    [
        (1, 64, 128, True),
        (1, 64, 96, True),
        (1, 64, 40, False),
        (1, None, 64, True),
        (0, 64, 128, False),
        (0, None, 64, False),
    ],
)
def test_weights_mean_the_stored_values(
    bits: int, axis: int, group_size: int | None, columns: int, stays_packed: bool
) -> None:
    """96 columns: a group reaches into the next row. 40: no kernel takes the parts of groups."""
    contract = TestHQQ()
    contract.bits = bits
    contract.axis = axis
    contract.group_size = group_size
    contract.prefix = "meta." if bits == 8 else ""
    tensors, true = contract.tensors((16, columns), np.random.default_rng(bits))
    weight = load(contract, tensors, 16, columns)
    assert (type(weight.weight()) is BlockWeight) == stays_packed
    torch.testing.assert_close(weight.dequantize(), torch.from_numpy(true), rtol=0, atol=3e-6)
    if bits == 4:  # viewed as another type of as many bytes
        again = load(contract, tensors | {"W_q": tensors["W_q"].view(torch.float16)}, 16, columns)
        assert torch.equal(again.dequantize(), weight.dequantize())


def test_whole_zero_points_are_exact() -> None:
    contract = TestHQQ()
    contract.has_whole_zeros = True
    tensors, true = contract.tensors((4, 128), np.random.default_rng(0))
    assert torch.equal(load(contract, tensors, 4, 128).dequantize(), torch.from_numpy(true))


def method(**config: Any) -> HQQ:
    config = {**TestHQQ().config, **config}
    return HQQ(None, QuantizationSetup(config, "float32", "cpu", REFERENCES))


def bits_of(found: HQQ, module: str) -> int | None:
    weight = found.linear(
        LinearLayer(module, 64, 8, (Part(f"{module}.weight", (0, 8)),), is_head=module == "lm_head")
    )
    if weight is None:
        return None
    [reader] = weight.readers.values()
    return int(reader.scheme.bits)  # type: ignore[attr-defined]


def test_which_modules_are_quantized() -> None:
    assert bits_of(method(), "model.layers.0.up_proj") == 4
    assert bits_of(method(skip_modules=["up_proj"]), "model.layers.0.up_proj") is None
    assert bits_of(method(skip_modules=[]), "lm_head") is None
    assert method().embedding(EmbeddingLayer("embed", 8, 64, Part("embed.weight", (0, 8)))) is None
    each = {
        "mlp.up_proj": {"weight_quant_params": {"nbits": 2}},
        "self_attn.q_proj": {"weight_quant_params": {"nbits": 8}},
    }
    found = method(quant_config=each)
    assert bits_of(found, "model.layers.0.mlp.up_proj") == 2
    assert bits_of(found, "model.layers.0.self_attn.q_proj") == 8
    assert bits_of(found, "model.layers.0.mlp.down_proj") is None


WEIGHT = {"nbits": 4, "group_size": 64}


@pytest.mark.parametrize(
    ("quant_config", "told"),
    [
        (None, "quant_config=None; HQQ needs an object"),
        ({"weight_quant_params": None}, "weight_quant_params=None; HQQ needs an object"),
        (
            {"weight_quant_params": {"nbits": 5}},
            "quant_config.weight_quant_params.nbits=5; HQQ supports 8, 4",
        ),
        ({"weight_quant_params": {**WEIGHT, "axis": 2}}, "axis=2; HQQ supports 0, 1"),
        (
            {"weight_quant_params": {**WEIGHT, "group_size": 0}},
            "group_size=0; HQQ needs a positive number",
        ),
        (
            {"weight_quant_params": {**WEIGHT, "channel_wise": False}},
            "channel_wise=False; HQQ needs true",
        ),
        (
            {"weight_quant_params": WEIGHT, "scale_quant_params": {}},
            "does not support scales and zero points that are quantized",
        ),
        ({"mlp.up_proj": 4}, "quant_config.mlp.up_proj=4; HQQ needs an object"),
    ],
)
def test_odd_configs_are_refused(quant_config: Any, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        method(quant_config=quant_config)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("scale", None, "did not contain model.part0.scale"),
        ("zero", torch.zeros(2, 1), r"zero has shape \(2, 1\)"),
        (
            "zero",
            torch.zeros(4, 1, dtype=torch.uint8),
            "zero is stored as uint8; this format needs floats",
        ),
        (
            "W_q",
            torch.zeros(3, 64, dtype=torch.uint8),
            r"W_q has shape \(3, 64\); model.merged expects \(2, 64\)",
        ),
        (
            "packing",
            torch.tensor(list(b"4bit_32"), dtype=torch.uint8),
            "packing says '4bit_32'; HQQ with 4 bits needs '4bit_u8'",
        ),
    ],
)
def test_broken_tensors_are_refused_by_name(name: str, value: Tensor | None, told: str) -> None:
    tensors, _ = TestHQQ().tensors((2, 128), np.random.default_rng(0))
    with pytest.raises(ModelError, match=told):
        load(
            TestHQQ(),
            {
                key: data
                for key, data in (tensors | {name: value}).items()
                if isinstance(data, Tensor)
            },
            2,
            128,
        )


def test_weights_that_are_not_whole_groups() -> None:
    with pytest.raises(ModelError, match="a weight of 2 × 48 cannot be divided into groups of 64"):
        load(TestHQQ(), {}, 2, 48)


def test_values_that_a_config_lacks_are_those_of_the_producer() -> None:
    """`HqqConfig` of transformers writes 4 bits, groups of 64, along axis 1."""
    scheme = _scheme(QuantConfig({"weight_quant_params": {}}, "HQQ"))
    assert (scheme.bits, scheme.group_size, scheme.axis) == (4, 64, 1)
    scheme = _scheme(QuantConfig({"weight_quant_params": {"group_size": None}}, "HQQ"))
    assert scheme.group_size is None
