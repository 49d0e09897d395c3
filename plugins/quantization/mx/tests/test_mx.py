"""MXFP4 weights, which the tests write as the format defines them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pegboard_quantization_mx.method import MXFP4
from pegboard_quantization_mx.plugin import MXFP4 as SPEC
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import TensorEntry, WeightPiece
from pegboard.ops import REFERENCES
from pegboard.ops.float_codes import CodeWeight
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import QuantizationContract

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def test_contract() -> None:
    check_entry(installed_entry("quantization", "mxfp4"))


class TestMXFP4(QuantizationContract):
    spec = SPEC
    block = 32
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}

    def method(self, setup: QuantizationSetup) -> MXFP4:
        return MXFP4(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        if part.name.startswith("model.embed"):
            return [WeightPiece(part.name, dtype, tuple(values.shape), values)], values.to(getattr(torch, dtype)).float()
        rng = np.random.default_rng(abs(int(values[0, 0] * 1e6)))
        codes, scales = rng.integers(0, 16, values.shape), rng.integers(115, 130, (len(values), values.shape[1] // 32))
        bytes_ = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).reshape(*scales.shape, 16)
        true = FP4[codes] * (np.float32(2) ** (scales - 127)).astype(np.float32).repeat(32, 1)
        pieces = self.pieces(part.name, bytes_, scales.astype(np.uint8))
        return pieces, torch.from_numpy(true).to(getattr(torch, dtype)).float()

    def pieces(self, name: str, codes: np.ndarray, scales: np.ndarray) -> list[WeightPiece]:
        tensors = {f"{name}_blocks": torch.from_numpy(codes), f"{name}_scales": torch.from_numpy(scales)}
        return [WeightPiece(each, "uint8", tuple(tensor.shape), tensor) for each, tensor in tensors.items()]

    def linear(self, layer: LinearLayer, dtype: str = "float32") -> Any:
        """The checkpoint's entries tell the names and shapes."""
        weight: Any = super().linear(layer, dtype)
        declare, available = weight.declare, {}
        for part in layer.parts:
            for piece in self.stored(part, self.values(0, part.rows[1] - part.rows[0], layer.in_features), dtype)[0]:
                available[piece.name] = TensorEntry(piece.name, piece.shape, piece.stored, "", 0, 0)
        weight.declare = lambda _: declare(available)
        return weight

    def test_weights_stay_packed_and_are_exact(self) -> None:
        layer = self.layer((5,), self.block * 2)
        weight = self.linear(layer)
        matrix = self.fill(weight, layer, 1)
        assert torch.equal(weight.dequantize(), matrix) and type(weight.weight()) is CodeWeight


class TestWithoutBlocks(TestMXFP4):
    """Rows of bytes, and scales with the type of powers of two."""

    def pieces(self, name: str, codes: np.ndarray, scales: np.ndarray) -> list[WeightPiece]:
        rows = torch.from_numpy(codes).flatten(1)
        powers = torch.from_numpy(scales).view(torch.float8_e8m0fnu)
        return [
            WeightPiece(name, "uint8", tuple(rows.shape), rows),
            WeightPiece(f"{name}_scale", "float8_e8m0fnu", tuple(powers.shape), powers),
        ]


def method(**config: Any) -> MXFP4:
    return MXFP4(None, QuantizationSetup({"quant_method": "mxfp4", **config}, "float32", "cpu", REFERENCES))


def test_what_is_not_quantized() -> None:
    found = method(modules_to_not_convert=["self_attn"])
    values = torch.randn(8, 32)
    for module, layer in [
        ("embed", EmbeddingLayer("embed", 8, 32, Part("embed.weight", (0, 8)))),
        ("lm_head", LinearLayer("lm_head", 32, 8, (Part("lm_head.weight", (0, 8)),), is_head=True)),
        ("self_attn.q", LinearLayer("self_attn.q", 32, 8, (Part("self_attn.q.weight", (0, 8)),))),
    ]:
        weight = found.embedding(layer) if isinstance(layer, EmbeddingLayer) else found.linear(layer)
        assert weight is not None
        weight.declare({})
        weight.accept(WeightPiece(f"{module}.weight", "float32", (8, 32), values))
        weight.finish()
        assert torch.equal(weight.dequantize(), values)


def test_experts_are_refused_with_the_reason() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    available = {name: TensorEntry(name, (2, 64, 1, 16), "uint8", "", 0, 0)}
    weight = method(modules_to_not_convert=["self_attn"]).linear(
        LinearLayer("self_attn.q", 32, 8, (Part("self_attn.q.weight", (0, 8)),))
    )
    assert weight is not None
    with pytest.raises(ModelError, match="gate_up_proj_blocks has experts in MXFP4, for which there are no layers yet"):
        weight.declare(available)


def test_odd_configs_and_tensors_are_refused() -> None:
    with pytest.raises(ModelError, match="modules_to_not_convert='x'; MXFP4 needs a list of texts"):
        method(modules_to_not_convert="x")
    for scale, told in [
        (torch.ones(4, 2), "m.weight_scale is stored as float32; this format needs float8_e8m0fnu or uint8"),
        (torch.ones(4, 1, dtype=torch.uint8), r"m.weight_scale has shape \(4, 1\); m expects \(4, 2\)"),
    ]:
        weight = method().linear(LinearLayer("m", 64, 4, (Part("m.weight", (0, 4)),)))
        tensors = {"m.weight": torch.zeros(4, 32, dtype=torch.uint8), "m.weight_scale": scale}
        pieces = [WeightPiece(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t) for name, t in tensors.items()]
        assert weight is not None
        weight.declare({each.name: TensorEntry(each.name, each.shape, each.stored, "", 0, 0) for each in pieces})
        with pytest.raises(ModelError, match=told):
            for each in pieces:
                weight.accept(each)
            weight.finish()
