"""FP-Quant weights, which the tests write as the format defines them, with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pegboard_quantization_mx.fp_quant import FPQuant
from pegboard_quantization_mx.plugin import FP_QUANT
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.ops.float_codes import CodeWeight
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import QuantizationContract, load_pieces, stored_pieces
from pegboard_testing.fake_build import references
from pegboard_testing.layouts import FP4, nibble_pairs

GROUP = 16
"""Columns that are multiplied by one Hadamard matrix."""


def test_contract() -> None:
    check_entry(installed_entry("quantization", "fp_quant"))


def hadamard() -> np.ndarray:
    signs = [
        [(-1.0) ** (row & column).bit_count() for column in range(GROUP)] for row in range(GROUP)
    ]
    return np.array(signs, np.float32) / np.float32(GROUP**0.5)


class TestFPQuantMXFP4(QuantizationContract):
    undivided = frozenset({"columns"})
    spec = FP_QUANT
    forward_dtype = "mxfp4"
    is_pseudo = False
    block = 32

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        config = {
            "quant_method": "fp_quant",
            "forward_dtype": self.forward_dtype,
            "forward_method": "abs_max",
        }
        more = {
            "hadamard_group_size": GROUP,
            "pseudoquantization": self.is_pseudo,
            "store_master_weights": False,
        }
        return {**config, **more, "modules_to_not_convert": ["lm_head"]}

    def method(self, setup: QuantizationSetup) -> FPQuant:
        return FPQuant(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        tensors, true = self.tensors(
            values.numpy(), np.random.default_rng(abs(int(values[0, 0] * 1e6)))
        )
        exact = torch.from_numpy(true.astype(np.float32))
        return stored_pieces(part.name.removesuffix(".weight"), tensors), exact

    def tensors(
        self, values: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        rows, columns = values.shape
        codes = rng.integers(0, 16, (rows, columns))
        if self.forward_dtype == "mxfp4":
            stored = torch.from_numpy(
                rng.integers(122, 128, (rows, columns // 32)).astype(np.uint8)
            )
            scale = 2.0 ** (stored.numpy().astype(np.float32) - 127)
        else:
            floats = torch.from_numpy(rng.random((rows, columns // 16))).to(torch.float8_e4m3fn)
            stored = floats.view(torch.uint8)
            scale = floats.float().numpy()
        dense = FP4[codes] * scale.repeat(columns // scale.shape[1], 1) / np.float32(3)
        matrix = hadamard()
        tensors = {"forward_hadamard_matrix": torch.from_numpy(matrix)}
        if self.is_pseudo:
            tensors["dqweight"] = torch.from_numpy(dense)
        else:
            tensors |= {
                "qweight": nibble_pairs(codes),
                "scales": stored,
                "weight_global_scale": torch.tensor([3.0]),
            }
            tensors["act_global_scale"] = torch.tensor([3.0])
        return tensors, (dense.reshape(rows, -1, GROUP) @ matrix.T).reshape(rows, columns)

    def test_weights_stay_packed(self) -> None:
        layer = self.layer((2, 3), self.block)
        weight = self.linear(layer)
        self.fill(weight, layer, 1)
        assert self.is_pseudo or [type(span.op) for span in weight.spans] == [CodeWeight]  # type: ignore[attr-defined]


class TestFPQuantNVFP4(TestFPQuantMXFP4):
    forward_dtype = "nvfp4"


class TestFPQuantPseudoQuantized(TestFPQuantMXFP4):
    is_pseudo = True


def linear(
    module: str = "model.part0", columns: int = 64, is_head: bool = False, **changes: Any
) -> Any:
    method = FPQuant(
        None,
        QuantizationSetup({**TestFPQuantMXFP4().config, **changes}, "float32", "cpu", references()),
    )
    return method.linear(
        LinearLayer(module, columns, 4, (Part(f"{module}.weight", (0, 4)),), is_head)
    )


def test_what_is_plain() -> None:
    assert linear() is not None
    assert linear(is_head=True) is None
    assert linear("model.gate", modules_to_not_convert=["gate"]) is None
    assert linear(store_master_weights=True) is None
    method = FPQuant(
        None, QuantizationSetup(TestFPQuantMXFP4().config, "float32", "cpu", references())
    )
    assert method.embedding(EmbeddingLayer("embed", 8, 64, Part("embed.weight", (0, 8)))) is None


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"forward_dtype": "mxfp8"}, "forward_dtype='mxfp8'; FP-Quant supports 'mxfp4', 'nvfp4'"),
        ({"hadamard_group_size": 0}, "hadamard_group_size=0; FP-Quant needs a positive number"),
        ({"pseudoquantization": 1}, "pseudoquantization=1; FP-Quant needs true or false"),
        (
            {"modules_to_not_convert": "x"},
            "modules_to_not_convert='x'; FP-Quant needs a list of texts",
        ),
    ],
)
def test_odd_configs_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        linear(**config)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("forward_hadamard_matrix", None, "did not contain model.part0.forward_hadamard_matrix"),
        ("forward_hadamard_matrix", torch.eye(8), r"forward_hadamard_matrix has shape \(8, 8\)"),
        (
            "scales",
            torch.ones(4, 2),
            "scales is stored as float32; this format needs float8_e8m0fnu or uint8",
        ),
        (
            "weight_global_scale",
            torch.zeros(1),
            "weight_global_scale is 0.0; this format divides by it",
        ),
        ("qweight", torch.zeros(4, 31, dtype=torch.uint8), r"qweight has shape \(4, 31\)"),
    ],
)
def test_broken_tensors_are_refused_by_name(name: str, value: Tensor | None, told: str) -> None:
    tensors, _ = TestFPQuantMXFP4().tensors(np.zeros((4, 64), np.float32), np.random.default_rng(0))
    changed = {
        key: data for key, data in (tensors | {name: value}).items() if isinstance(data, Tensor)
    }
    with pytest.raises(ModelError, match=told):
        load_pieces(linear(), stored_pieces("model.part0", changed))


def test_columns_that_are_not_whole_groups_are_refused() -> None:
    with pytest.raises(
        ModelError,
        match="model.part0 has 72 columns; .*forward_hadamard_matrix needs a multiple of 16",
    ):
        linear(columns=72).declare({})
