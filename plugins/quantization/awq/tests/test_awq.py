"""AWQ weights, which the tests write as the format defines them: bit by bit, with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pegboard_quantization_awq.plugin import AWQ as SPEC
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.ops import REFERENCES
from pegboard.ops.blocks import BlockWeight
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import QuantizationContract, stored_pieces
from pegboard_weights.awq_layout import AWQ


@pytest.mark.parametrize("name", ["awq", "awq_marlin", "cpu_awq", "auto_awq"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("quantization", name))


def words(codes: np.ndarray, places: tuple[int, ...]) -> Tensor:
    """Pack codes [n, m] along m: `places[i]` of every eight codes goes to bits 4i to 4i + 3 of a
    word."""
    n, m = codes.shape
    packed = np.zeros((n, m // 8), np.uint32)
    for i, place in enumerate(places):
        packed |= codes[:, place::8].astype(np.uint32) << np.uint32(4 * i)
    return torch.from_numpy(packed.view(np.int32))


class TestGemm(QuantizationContract):
    spec = SPEC
    group_size = 128
    version = "gemm"
    has_zeros = True
    row_block = 8
    """Words hold eight rows."""

    @property
    def block(self) -> int:  # type: ignore[override]
        return self.group_size

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        config = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group_size,
            "version": self.version,
        }
        return {**config, "zero_point": self.has_zeros, "modules_to_not_convert": None}

    def method(self, setup: QuantizationSetup) -> AWQ:
        return AWQ(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        if part.name.startswith("model.embed"):
            return [WeightPiece(part.name, dtype, tuple(values.shape), values)], values.to(
                getattr(torch, dtype)
            ).float()
        rows, columns = values.shape
        rng = np.random.default_rng(abs(int(values[0, 0] * 1e6)))
        groups = columns // self.group_size
        codes = rng.integers(0, 16, (rows, columns))
        zeros = (
            rng.integers(0, 16, (rows, groups)) if self.has_zeros else np.full((rows, groups), 8)
        )
        scales = (rng.random((rows, groups)) * 0.1).astype(np.float16)
        true = (codes - zeros.repeat(self.group_size, 1)) * scales.astype(np.float32).repeat(
            self.group_size, 1
        )
        return self.pieces(part.name.removesuffix(".weight"), codes, zeros, scales), self.rounded(
            true, dtype
        )

    def rounded(self, true: np.ndarray, dtype: str) -> Tensor:
        return torch.from_numpy(true.astype(np.float32)).to(getattr(torch, dtype)).float()

    def pieces(
        self, module: str, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray
    ) -> list[WeightPiece]:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"qweight": words(codes.T, order), "scales": torch.from_numpy(scales.T.copy())}
        return self.named(module, {**tensors, "qzeros": words(zeros.T, order)})

    def named(self, module: str, tensors: dict[str, Tensor]) -> list[WeightPiece]:
        if not self.has_zeros:
            del tensors["qzeros"]
        return stored_pieces(module, tensors)

    def test_weights_stay_packed(self) -> None:
        layer = self.layer((2,), self.block * 2)
        weight = self.linear(layer)
        self.fill(weight, layer, 1)
        assert (type(weight.weight()) is BlockWeight) == (self.group_size != 8)


class TestGemmOfOtherGroups(TestGemm):
    group_size = 32


class TestGemmOfSmallGroups(TestGemm):
    group_size = 16


class TestGemmOfGroupsThatNoKernelTakes(TestGemm):
    group_size = 8


class TestGemmWithoutZeros(TestGemm):
    has_zeros = False


class TestGemv(TestGemm):
    version = "gemv"
    group_size = 64

    def pieces(
        self, module: str, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray
    ) -> list[WeightPiece]:
        rows, groups = zeros.shape
        # two words of eight: groups of 64 are padded to an even number of words
        width = -(-groups // 16) * 16
        padded = np.zeros((2, rows, width))
        padded[0, :, :groups] = zeros
        padded[1, :, :groups] = scales
        tensors = {
            "qweight": words(codes, tuple(range(8))),
            "scales": torch.from_numpy(padded[1].astype(np.float16)),
        }
        return self.named(
            module, {**tensors, "qzeros": words(padded[0].astype(np.int64), tuple(range(8)))}
        )


def method(**config: Any) -> AWQ:
    return AWQ(
        None, QuantizationSetup({"quant_method": "awq", **config}, "float32", "cpu", REFERENCES)
    )


def test_what_is_not_quantized() -> None:
    part = Part("lm_head.weight", (0, 8))
    found = method(modules_to_not_convert=["mlp.gate", "visual"])
    assert found.embedding(EmbeddingLayer("embed", 8, 128, part)) is None
    assert found.linear(LinearLayer("lm_head", 128, 8, (part,), is_head=True)) is None
    for module in ("model.layers.0.mlp.gate", "visual.blocks.3.qkv"):
        assert (
            found.linear(LinearLayer(module, 128, 8, (Part(f"{module}.weight", (0, 8)),))) is None
        )
    module = "model.layers.0.mlp.gate_proj"
    assert (
        found.linear(LinearLayer(module, 128, 8, (Part(f"{module}.weight", (0, 8)),))) is not None
    )


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"bits": 3}, "bits=3; AWQ supports 4"),
        ({"w_bit": 8}, "w_bit=8"),
        ({"group_size": 0}, "group_size=0; AWQ needs a positive number or -1"),
        ({"group_size": "128"}, "group_size='128'"),
        ({"zero_point": 1}, "zero_point=1; AWQ needs true or false"),
        ({"version": "exllama"}, "version='exllama'; AWQ supports 'gemm'"),
        ({"modules_to_not_convert": "lm_head"}, "needs a list of texts"),
    ],
)
def test_odd_configs_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        method(**config)


def test_columns_that_are_not_whole_groups_are_refused() -> None:
    with pytest.raises(ModelError, match="m has 96 columns, which are not groups of 64"):
        method(group_size=64).linear(LinearLayer("m", 96, 8, (Part("m.weight", (0, 8)),)))


@pytest.mark.parametrize("name", ["qweight", "scales", "qzeros"])
def test_tensors_of_other_types_are_refused(name: str) -> None:
    contract = TestGemm()
    layer = contract.layer((1,), 128)
    weight = contract.linear(layer)
    weight.declare({})
    pieces, _ = contract.stored(layer.parts[0], contract.values(0, 8, 128), "float32")
    for piece in pieces:
        assert isinstance(piece.data, Tensor)
        if piece.name.endswith(name):
            piece.data = piece.data.to(torch.int64 if name != "scales" else torch.int32)
        weight.accept(piece)
    with pytest.raises(
        ModelError, match=f"{name} is stored as .*; this format needs (int32|floats)"
    ):
        weight.finish()


def test_the_config_of_the_first_checkpoints() -> None:
    """It names the values in another way (`quant_config.json`)."""
    written = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    setup = QuantizationSetup({"quant_method": "awq", **written}, "float32", "cpu", REFERENCES)
    reader = AWQ(None, setup).reader("a", LinearLayer("a", 128, 8, (Part("a.weight", (0, 8)),)))
    assert reader is not None
    assert (reader.group_size, reader.has_zeros, reader.is_gemv) == (64, True, False)
