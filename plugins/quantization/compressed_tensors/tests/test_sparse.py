"""Weights of which zeros are left out, which the tests write as the formats define them, with
numpy."""

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
from pegboard_testing.contract_quantization import QuantizationContract, load_pieces, stored_pieces
from pegboard_testing.layouts import marlin_24, scales_of_marlin_24


def two_of_four(values: np.ndarray, rng: np.random.Generator, zero: int = 0) -> np.ndarray:
    """Set two of four consecutive columns to zero."""
    order = rng.random((values.size // 4, 4)).argsort(1)
    return np.where(order.reshape(values.shape) < 2, values, zero)


class Sparse(QuantizationContract):
    spec = COMPRESSED_TENSORS

    def method(self, setup: QuantizationSetup) -> CompressedTensors:
        return CompressedTensors(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        if "embed" in part.name and self.config["format"] != "dense":
            return [WeightPiece(part.name, dtype, tuple(values.shape), values)], values.to(
                getattr(torch, dtype)
            ).float()
        tensors, true = self.tensors(
            values.numpy(), np.random.default_rng(abs(int(values[0, 0] * 1e6)))
        )
        exact = torch.from_numpy(true.astype(np.float32)).to(getattr(torch, dtype)).float()
        return stored_pieces(part.name.removesuffix(".weight"), tensors), exact

    def tensors(
        self, values: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        raise AssertionError("override tensors")


class TestMarlin24(Sparse):
    bits = 4
    group_size: int | None = 128
    block = 128
    row_block = 64

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "group_size": self.group_size,
        }
        weights["strategy"] = "group" if self.group_size else "channel"
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {
            "quant_method": "compressed-tensors",
            "format": "marlin-24",
            "config_groups": groups,
            "ignore": ["lm_head"],
        }

    def tensors(
        self, values: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        half = 1 << (self.bits - 1)
        (rows, columns) = values.shape
        codes = two_of_four(rng.integers(0, 2 * half, values.shape), rng, half)
        size = self.group_size or columns
        scales = (rng.random((rows, columns // size)) * 0.1).astype(np.float16)
        words, meta = marlin_24(codes, self.bits)
        tensors = {
            "weight_packed": words,
            "meta": meta,
            "scale_packed": scales_of_marlin_24(scales, columns),
        }
        return tensors, (codes - half) * scales.astype(np.float32).repeat(size, 1)


class TestMarlin24EightBitsPerChannel(TestMarlin24):
    bits = 8
    group_size = None
    block = 32


def with_mask(dense: Tensor) -> dict[str, Tensor]:
    """Store the values that are not zero. Floats of 8 bits are compared as bytes."""
    kept = (dense.view(torch.uint8) != 0) if dense.element_size() == 1 else dense != 0
    mask = torch.from_numpy(np.packbits(kept.numpy(), axis=1, bitorder="little"))
    compressed = (
        dense.view(torch.uint8)[kept].view(dense.dtype)
        if dense.element_size() == 1
        else dense[kept]
    )
    return {"compressed": compressed, "bitmask": mask, "shape": torch.tensor(dense.shape)}


class TestBitmask(Sparse):
    """Floats. A row may have any number of zeros."""

    config = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "sparsity_config": {"format": "sparse-bitmask"},
    }
    block = 20

    def tensors(
        self, values: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        dense = torch.from_numpy(
            np.where(rng.random(values.shape) < 0.5, values, 0).astype(np.float32)
        ).bfloat16()
        return with_mask(dense) | {"row_offsets": torch.arange(len(dense))}, dense.float().numpy()


class TestBitmask24OfFloat8(Sparse):
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "sparsity_config": {"format": "sparse-24-bitmask"},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
            }
        },
    }
    block = 32

    def tensors(
        self, values: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        values = two_of_four(np.where(values == 0, 1, values), rng)
        codes = torch.from_numpy(values.astype(np.float32) * 64).to(torch.float8_e4m3fn)
        scale = torch.from_numpy(rng.random((len(values), 1))).float()
        tensors = with_mask(codes) | {"shape": torch.tensor(codes.shape).reshape(2, 1)}
        tensors["compressed"] = tensors["compressed"].reshape(len(values), -1)
        return tensors | {"weight_scale": scale}, codes.float().numpy() * scale.numpy()


class TestBitmask24OfInt8(Sparse):
    config = {
        **TestBitmask24OfFloat8.config,
        "format": "int-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
        },
    }
    block = 32

    def tensors(
        self, values: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        codes = torch.from_numpy(
            two_of_four(rng.integers(1, 128, values.shape), rng).astype(np.int8)
        )
        scale = torch.from_numpy(rng.random((len(values), 1))).float()
        return with_mask(codes) | {"weight_scale": scale}, codes.float().numpy() * scale.numpy()


def test_modules_that_are_stored_dense_are_read_as_such() -> None:
    contract = TestBitmask()
    weight = contract.linear(contract.layer((3,), 20))
    values = torch.randn(3, 20)
    load_pieces(weight, stored_pieces("model.part0", {"weight": values}))
    assert torch.equal(weight.dequantize(), values)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        (
            "compressed",
            torch.zeros(3),
            "model.part0.compressed does not have the 40 values that its bitmask marks",
        ),
        ("compressed", None, "did not contain model.part0.compressed"),
        ("bitmask", torch.zeros(4, 2, dtype=torch.uint8), "model.part0.bitmask has shape .4, 2."),
        (
            "bitmask",
            torch.zeros(4, 3, dtype=torch.int8),
            "model.part0.bitmask is stored as int8; this format needs uint8",
        ),
        (
            "shape",
            torch.tensor([4, 40]),
            r"model.part0.shape says \[4, 40\]; .* has the shape \[4, 20\]",
        ),
    ],
)
def test_broken_masks_are_refused_by_name(name: str, value: Tensor | None, told: str) -> None:
    contract = TestBitmask()
    dense = torch.ones(4, 20).bfloat16()
    dense[:, ::2] = 0
    tensors = {
        key: data for key, data in (with_mask(dense) | {name: value}).items() if data is not None
    }
    with pytest.raises(ModelError, match=told):
        load_pieces(
            contract.linear(contract.layer((4,), 20)), stored_pieces("model.part0", tensors)
        )


@pytest.mark.parametrize(
    ("rows", "columns", "told"),
    [
        (
            32,
            128,
            "model.part0 has 32 rows and 128 columns; marlin-24 needs multiples of 64 and 32",
        ),
        (64, 80, "80 columns"),
    ],
)
def test_sizes_that_marlin_24_does_not_have(rows: int, columns: int, told: str) -> None:
    contract = TestMarlin24EightBitsPerChannel()
    contract.row_block = 1
    with pytest.raises(ModelError, match=told):
        contract.linear(contract.layer((rows,), columns)).declare({})


def test_marlin_24_is_symmetric() -> None:
    contract = TestMarlin24()
    config = contract.config
    config["config_groups"]["group_0"]["weights"]["symmetric"] = False
    with pytest.raises(ModelError, match="symmetric=False; compressed-tensors supports True"):
        CompressedTensors(None, QuantizationSetup(config, "float32", "cpu"))
