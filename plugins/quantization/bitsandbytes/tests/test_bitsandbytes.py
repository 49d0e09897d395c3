"""bitsandbytes weights, which the tests write as the format defines them, with numpy."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from pegboard_quantization_bitsandbytes.format import NF4, BitsAndBytes
from pegboard_quantization_bitsandbytes.plugin import BITSANDBYTES
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.ops import REFERENCES
from pegboard.ops.blocks import BlockWeight
from pegboard.ops.float_codes import CodeWeight
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import QuantizationContract, load_pieces, stored_pieces


def test_contract() -> None:
    check_entry(installed_entry("quantization", "bitsandbytes"))


class TestEightBits(QuantizationContract):
    spec = BITSANDBYTES
    config = {
        "quant_method": "bitsandbytes",
        "load_in_8bit": True,
        "load_in_4bit": False,
        "llm_int8_skip_modules": None,
    }
    block = 32
    held: type = BlockWeight

    def method(self, setup: QuantizationSetup) -> BitsAndBytes:
        return BitsAndBytes(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        tensors, true = self.tensors(
            values.numpy(), np.random.default_rng(abs(int(values[0, 0] * 1e6)))
        )
        exact = torch.from_numpy(true.astype(np.float32)).to(getattr(torch, dtype)).float()
        return stored_pieces(part.name.removesuffix(".weight"), tensors), exact

    def tensors(
        self, values: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        codes = rng.integers(-127, 128, values.shape).astype(np.int8)
        largest = (rng.random(len(values)) * 3).astype(np.float32)
        tensors = {"weight": torch.from_numpy(codes), "SCB": torch.from_numpy(largest)}
        true = codes * (largest / np.float32(127))[:, None]
        return tensors | {"weight_format": torch.tensor(0, dtype=torch.uint8)}, true

    def test_weights_stay_packed(self) -> None:
        layer = self.layer((2,), self.block * 2)
        weight = self.linear(layer)
        self.fill(weight, layer, 1)
        assert type(weight.weight()) is self.held


class TestFourBits(TestEightBits):
    cut_block = 128
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "llm_int8_skip_modules": ["x"],
    }
    kind = "nf4"
    block_size = 64
    is_nested = True
    storage = torch.uint8
    held = CodeWeight

    def tensors(
        self, values: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        num_blocks = -(-values.size // self.block_size)
        codes = rng.integers(0, 16, values.size)
        table = np.sort(rng.standard_normal(16)).astype(np.float32)
        state: dict[str, Any] = {
            "quant_type": self.kind,
            "blocksize": self.block_size,
            "dtype": "bfloat16",
        }
        state["shape"] = list(values.shape)
        packed = torch.from_numpy((codes[::2] << 4 | codes[1::2]).astype(np.uint8))
        tensors = {
            "weight": packed.view(self.storage).unsqueeze(1),
            "weight.quant_map": torch.from_numpy(table),
        }
        if self.is_nested:
            state |= {"nested_blocksize": 2, "nested_dtype": "float32", "nested_offset": 0.5}
            stored = rng.integers(0, 256, num_blocks).astype(np.uint8)
            map_ = rng.random(256).astype(np.float32)
            outer = rng.random(-(-num_blocks // 2)).astype(np.float32)
            absmax = map_[stored] * outer[np.arange(num_blocks) // 2] + np.float32(0.5)
            tensors["weight.nested_quant_map"] = torch.from_numpy(map_)
            tensors["weight.nested_absmax"] = torch.from_numpy(outer)
            tensors["weight.absmax"] = torch.from_numpy(stored)
        else:
            absmax = rng.random(num_blocks).astype(np.float32)
            tensors["weight.absmax"] = torch.from_numpy(absmax)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        tensors[f"weight.quant_state.bitsandbytes__{self.kind}"] = torch.from_numpy(text)
        true = table[codes] * absmax[np.arange(values.size) // self.block_size]
        return tensors, true.reshape(values.shape)


class TestOnline(TestEightBits):
    cut_block = 64
    config: dict[str, Any] = {}
    held = CodeWeight

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        values = values.bfloat16()
        flat = values.float().numpy().reshape(-1)
        blocks = np.pad(flat, (0, -len(flat) % 64)).reshape(-1, 64)
        absmax = np.abs(blocks).max(1, keepdims=True)
        near = np.abs((blocks / absmax)[..., None] - NF4.numpy()).argmin(-1)
        true = (NF4.numpy()[near] * absmax).reshape(-1)[: len(flat)].reshape(values.shape)
        exact = torch.from_numpy(true).to(getattr(torch, dtype)).float()
        return [WeightPiece(part.name, "bfloat16", tuple(values.shape), values)], exact


def load(contract: TestEightBits, tensors: dict[str, Tensor], columns: int, rows: int = 3) -> Any:
    weight = contract.linear(contract.layer((rows,), columns))
    load_pieces(weight, stored_pieces("model.part0", tensors))
    return weight


@pytest.mark.parametrize("columns", [20, 96, 128])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_mean_the_stored_values(
    columns: int, storage: torch.dtype, is_nested: bool, kind: str
) -> None:
    """20 columns: no kernel takes them. 96: blocks reach into the next row."""
    contract = TestFourBits()
    contract.storage = storage
    contract.is_nested = is_nested
    contract.kind = kind
    tensors, true = contract.tensors(np.zeros((4, columns)), np.random.default_rng(columns))
    assert torch.equal(
        load(contract, tensors, columns, rows=4).dequantize(), torch.from_numpy(true)
    )


@pytest.mark.parametrize("contract", [TestEightBits, TestFourBits])
def test_modules_that_are_stored_as_floats_are_plain(contract: type[TestEightBits]) -> None:
    values = torch.randn(3, 32)
    assert torch.equal(load(contract(), {"weight": values}, 32).dequantize(), values)


def method(**config: Any) -> BitsAndBytes:
    return BitsAndBytes(None, QuantizationSetup(config, "float32", "cpu", REFERENCES))


def test_what_is_not_quantized() -> None:
    part = Part("lm_head.weight", (0, 8))
    found = method(load_in_4bit=True, llm_int8_skip_modules=["lm_head", "mlp.gate"])
    assert found.embedding(EmbeddingLayer("embed", 8, 128, part)) is None
    assert found.linear(LinearLayer("lm_head", 128, 8, (part,), is_head=True)) is None
    assert method().linear(LinearLayer("lm_head", 128, 8, (part,), is_head=True)) is None
    assert (
        found.linear(LinearLayer("up", 128, 8, (Part("mlp.gate_proj.weight", (0, 8)),))) is not None
    )


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "load_in_4bit=False; bitsandbytes needs one of load_in_4bit and load_in_8bit",
        ),
        (
            {"load_in_4bit": True, "load_in_8bit": True},
            "load_in_4bit=True; bitsandbytes needs one of",
        ),
        ({"load_in_4bit": "yes"}, "load_in_4bit='yes'; bitsandbytes needs true or false"),
        ({"load_in_4bit": True, "llm_int8_skip_modules": 3}, "needs a list of texts"),
    ],
)
def test_odd_configs_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        method(**config)


def text(**state: Any) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("contract", "name", "value", "told"),
    [
        (TestEightBits, "SCB", None, "did not contain model.part0.SCB"),
        (TestEightBits, "SCB", torch.ones(2), r"SCB has shape \(2,\)"),
        (
            TestEightBits,
            "weight_format",
            torch.tensor(2, dtype=torch.uint8),
            "weight_format names a layout of GPU kernels",
        ),
        (
            TestFourBits,
            "weight",
            torch.zeros(47, 1, dtype=torch.uint8),
            "weight has shape .47, 1.; model.merged expects .48, 1.",
        ),
        (TestFourBits, "weight.absmax", None, "did not contain model.part0.weight.absmax"),
        (
            TestFourBits,
            "weight.absmax",
            torch.zeros(1, dtype=torch.uint8),
            "absmax has 1 values; this weight needs 2",
        ),
        (
            TestFourBits,
            "weight.quant_map",
            torch.zeros(8),
            "quant_map has 8 values; this weight needs 16",
        ),
        (
            TestFourBits,
            "weight.nested_absmax",
            None,
            "has no tensor model.part0.weight.nested_absmax",
        ),
        (TestFourBits, STATE, None, "has no tensor model.part0.weight.quant_state"),
        (
            TestFourBits,
            STATE,
            torch.tensor([1, 200], dtype=torch.uint8),
            "bitsandbytes__nf4 is not JSON",
        ),
        (TestFourBits, STATE, text(), "has blocksize=None; bitsandbytes needs a positive number"),
        (
            TestFourBits,
            STATE,
            text(blocksize=64, shape=[32, 3]),
            r"quantized with the shape \(32, 3\); this model needs \(3, 32\)",
        ),
        (TestFourBits, STATE, text(blocksize=64, nested_blocksize=0), "has nested_blocksize=0"),
        (
            TestFourBits,
            STATE,
            text(blocksize=64, nested_blocksize=256),
            "has nested_offset=None; bitsandbytes needs a number",
        ),
    ],
)
def test_broken_tensors_are_refused_by_name(
    contract: type[TestEightBits], name: str, value: Tensor | None, told: str
) -> None:
    made = contract()
    tensors, _ = made.tensors(np.zeros((3, 32)), np.random.default_rng(0))
    with pytest.raises(ModelError, match=told):
        load(
            made,
            {
                key: data
                for key, data in (tensors | {name: value}).items()
                if isinstance(data, Tensor)
            },
            32,
        )


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ModelError, match="weight has values that are not finite"):
        load(TestOnline(), {"weight": torch.full((3, 32), float("nan"))}, 32)
