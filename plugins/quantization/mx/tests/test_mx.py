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
from pegboard.layers import Experts, RouterRule
from pegboard.ops import REFERENCES
from pegboard.ops.float_codes import CodeWeight
from pegboard_models.clamped_swiglu import ClampedSwiGLU
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import QuantizationContract
from pegboard_testing.fake_build import fake_build

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
            return [WeightPiece(part.name, dtype, tuple(values.shape), values)], values.to(
                getattr(torch, dtype)
            ).float()
        rng = np.random.default_rng(abs(int(values[0, 0] * 1e6)))
        codes = rng.integers(0, 16, values.shape)
        scales = rng.integers(115, 130, (len(values), values.shape[1] // 32))
        bytes_ = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).reshape(*scales.shape, 16)
        true = FP4[codes] * (np.float32(2) ** (scales - 127)).astype(np.float32).repeat(32, 1)
        pieces = self.pieces(part.name, bytes_, scales.astype(np.uint8))
        return pieces, torch.from_numpy(true).to(getattr(torch, dtype)).float()

    def pieces(self, name: str, codes: np.ndarray, scales: np.ndarray) -> list[WeightPiece]:
        tensors = {
            f"{name}_blocks": torch.from_numpy(codes),
            f"{name}_scales": torch.from_numpy(scales),
        }
        return [
            WeightPiece(each, "uint8", tuple(tensor.shape), tensor)
            for each, tensor in tensors.items()
        ]

    def linear(self, layer: LinearLayer, dtype: str = "float32") -> Any:
        """The checkpoint's entries tell the names and shapes."""
        weight: Any = super().linear(layer, dtype)
        declare = weight.declare
        available = {}
        for part in layer.parts:
            values = self.values(0, *part.shape(layer.in_features))
            for piece in self.stored(part, values, dtype)[0]:
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
    return MXFP4(
        None, QuantizationSetup({"quant_method": "mxfp4", **config}, "float32", "cpu", REFERENCES)
    )


def test_what_is_not_quantized() -> None:
    found = method(modules_to_not_convert=["self_attn"])
    values = torch.randn(8, 32)
    for module, layer in [
        ("embed", EmbeddingLayer("embed", 8, 32, Part("embed.weight", (0, 8)))),
        ("lm_head", LinearLayer("lm_head", 32, 8, (Part("lm_head.weight", (0, 8)),), is_head=True)),
        ("self_attn.q", LinearLayer("self_attn.q", 32, 8, (Part("self_attn.q.weight", (0, 8)),))),
    ]:
        weight = (
            found.embedding(layer) if isinstance(layer, EmbeddingLayer) else found.linear(layer)
        )
        assert weight is not None
        weight.declare({})
        weight.accept(WeightPiece(f"{module}.weight", "float32", (8, 32), values))
        weight.finish()
        assert torch.equal(weight.dequantize(), values)


def test_stacked_experts_of_gpt_oss() -> None:
    """Blocks and scales have a first dimension of experts, gate and up alternate, and down has its
    own blocks."""
    rng = np.random.default_rng(3)
    experts = 3
    width = 64
    tensors = {}
    dense = {}
    for name, rows in (("gate_up_proj", 2 * width), ("down_proj", 32)):
        columns = 32 if name == "gate_up_proj" else width
        codes = rng.integers(0, 16, (experts, rows, columns))
        scales = rng.integers(120, 127, (experts, rows, columns // 32))
        packed = (
            (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8).reshape(*scales.shape, 16)
        )
        tensors[f"e.{name}_blocks"] = torch.from_numpy(packed)
        tensors[f"e.{name}_scales"] = torch.from_numpy(scales.astype(np.uint8))
        tensors[f"e.{name}_bias"] = torch.randn(experts, rows)
        dense[name] = torch.from_numpy(
            FP4[codes] * (np.float32(2) ** (scales - 127)).astype(np.float32).repeat(32, 2)
        )
    build = fake_build(path="e", quantization=method())
    layer = Experts(
        build,
        experts,
        32,
        width,
        rule=RouterRule(1, renormalize=True),
        bias=True,
        activation=ClampedSwiGLU(1.702, 7.0),
        is_transposed=True,
        is_interleaved=True,
    )
    index = {
        name: TensorEntry(
            name, tuple(t.shape), "uint8" if t.dtype == torch.uint8 else "float32", "", 0, 0
        )
        for name, t in tensors.items()
    }
    wanted = layer.declare(index)
    assert sorted(each.name for each in wanted) == sorted(tensors) and all(
        each.shape == index[each.name].shape for each in wanted
    )
    for each in wanted:
        tensor = tensors[each.name]
        layer.accept(WeightPiece(each.name, index[each.name].stored, tuple(tensor.shape), tensor))
    layer.finish()
    layer.bind()
    x = torch.randn(6, 32)
    logits = torch.randn(6, experts)
    for token, expert in enumerate(logits.argmax(1).tolist()):
        gate_up = dense["gate_up_proj"][expert] @ x[token] + tensors["e.gate_up_proj_bias"][expert]
        gate = gate_up[::2].clamp(max=7)
        up = gate_up[1::2].clamp(-7, 7)
        inner = (up + 1) * gate * (1.702 * gate).sigmoid()
        expected = dense["down_proj"][expert] @ inner + tensors["e.down_proj_bias"][expert]
        torch.testing.assert_close(layer(x, logits)[token], expected, atol=1e-3, rtol=1e-4)


def test_odd_configs_and_tensors_are_refused() -> None:
    with pytest.raises(ModelError, match="modules_to_not_convert='x'; MXFP4 needs a list of texts"):
        method(modules_to_not_convert="x")
    for scale, told in [
        (
            torch.ones(4, 2),
            "m.weight_scale is stored as float32; this format needs float8_e8m0fnu or uint8",
        ),
        (
            torch.ones(4, 1, dtype=torch.uint8),
            r"m.weight_scale has shape \(4, 1\); m expects \(4, 2\)",
        ),
    ]:
        weight = method().linear(LinearLayer("m", 64, 4, (Part("m.weight", (0, 4)),)))
        tensors = {"m.weight": torch.zeros(4, 32, dtype=torch.uint8), "m.weight_scale": scale}
        pieces = [
            WeightPiece(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t)
            for name, t in tensors.items()
        ]
        assert weight is not None
        weight.declare(
            {
                each.name: TensorEntry(each.name, each.shape, each.stored, "", 0, 0)
                for each in pieces
            }
        )
        with pytest.raises(ModelError, match=told):
            for each in pieces:
                weight.accept(each)
            weight.finish()
