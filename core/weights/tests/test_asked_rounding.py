"""What checkpoints ask for, when it is done, and static scales of merged layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import LinearLayer, Part, QuantizationSetup
from pegboard.ops import REFERENCES, BlockWeight
from pegboard.ops.rounding import Rounding
from pegboard_testing.contract_quantization import load_pieces, stored_pieces
from pegboard_weights.asked_rounding import AskedRounding, choose_rounding, scheme_rounding
from pegboard_weights.config import QuantConfig
from pegboard_weights.grouped import block_form, group_grid, signed_rows
from pegboard_weights.stored_weight import AnyLayer, FormatMethod, stored_as

TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, AskedRounding("int8")),
        ({"type": "float"}, AskedRounding("float8_e4m3fn")),
        ({"dynamic": False, "strategy": "tensor"}, AskedRounding("int8", is_static=True)),
        ({"strategy": "group", "group_size": 128}, AskedRounding("int8", 128)),
        ({"strategy": "group", "group_size": 48}, None),
        ({"strategy": "tensor"}, AskedRounding("int8", is_shared=True)),
        ({"strategy": "tensor", "type": "float"}, AskedRounding("float8_e4m3fn")),
        ({"symmetric": False}, AskedRounding("int8", is_symmetric=False)),
        (
            {"symmetric": False, "dynamic": False, "strategy": "tensor"},
            AskedRounding("int8", is_static=True, is_symmetric=False),
        ),
        ({"num_bits": 4}, None),
        ({"symmetric": False, "type": "float"}, None),
        ({"type": "other"}, None),
        ({"dynamic": "local", "strategy": "tensor_group"}, None),
    ],
)
def test_schemes_of_compressed_tensors(
    changes: dict[str, Any], expected: AskedRounding | None
) -> None:
    assert scheme_rounding(QuantConfig({**TOKEN, **changes}, "test")) == expected


class Faster(BlockWeight):
    @classmethod
    def takes(cls, rounding: Rounding, is_faster: bool) -> bool:
        return rounding.type == "int8"


@pytest.mark.parametrize(
    ("rounding", "kernel", "is_done"),
    [
        ("none", Faster, False),
        ("auto", Faster, True),
        ("auto", BlockWeight, False),
        ("checkpoint", BlockWeight, True),
    ],
)
def test_when_it_is_done(
    rounding: str, kernel: type, is_done: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pegboard")
    kernels = {**REFERENCES, "block_weight": kernel}
    setup = QuantizationSetup({}, "float32", "cpu", kernels, rounding=rounding)
    asked = AskedRounding("int8", 128)
    chosen = choose_rounding(setup, "test", "block_weight", [asked, None])
    assert chosen == ({asked} if is_done else set())
    said = "rounded to int8 with a scale per token and 128 columns"
    assert said in caplog.text and ("are not rounded" in caplog.text) != is_done


class BytesReader:
    def tensors(self, part: Part, columns: int, available: Mapping[str, Any]) -> list[Any]:
        module = part.name.removesuffix(".weight")
        rows = part.rows[1] - part.rows[0]
        return [
            stored_as(available, part.name, (rows, columns)),
            stored_as(available, f"{module}.weight_scale", (rows, 1)),
        ]

    def form(self, part: Part, columns: int, pieces: Any) -> Any:
        return block_form(columns, columns)

    def grid(self, part: Part, columns: int, pieces: Any) -> Any:
        return group_grid(columns, columns)

    def read(self, part: Part, columns: int, pieces: Any) -> Any:
        scale = part.name.removesuffix("weight") + "weight_scale"
        return signed_rows(pieces, part.name, scale, None, 8, columns)

    def key(self, part: Part, pieces: Any) -> list[object]:
        return []


class Method(FormatMethod):
    def reader(self, module: str, layer: AnyLayer) -> BytesReader:
        return BytesReader()

    def rounding(self, module: str, layer: AnyLayer) -> AskedRounding | None:
        return None if module == "c" else AskedRounding("int8", is_static=True)


def pieces_of(*scales: float) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    pieces = []
    for name, scale in zip("abc", scales, strict=False):
        codes = torch.randint(-128, 128, (4, 32), dtype=torch.int8, generator=generator)
        tensors = {"weight": codes, "weight_scale": torch.rand(4, 1, generator=generator)}
        pieces += stored_pieces(name, {**tensors, "input_scale": torch.tensor(scale)})
    return pieces


def test_merged_layers_share_the_largest_scale() -> None:
    """A part that is not asked about is held apart. A reload may not change the scale."""
    parts = tuple(Part(f"{name}.weight", (4 * i, 4 * i + 4)) for i, name in enumerate("abc"))
    setup = QuantizationSetup({}, "float32", "cpu", REFERENCES, rounding="checkpoint")
    weight = Method(setup).linear(LinearLayer("abc", 32, 12, parts))
    assert weight is not None
    load_pieces(weight, pieces_of(0.02, 0.03, 0.5))
    x = torch.randn(3, 32)
    matrix = weight.dequantize()
    rounded = Rounding("int8", scale=torch.tensor(0.03).item()).rounded(x)
    expected = torch.cat([rounded @ matrix[:8].T, x @ matrix[8:].T], 1)
    torch.testing.assert_close(weight.bind(REFERENCES)(x), expected)
    load_pieces(weight, pieces_of(0.02, 0.03, 0.1))
    with pytest.raises(ModelError, match="must not change input_scale of a"):
        load_pieces(weight, pieces_of(0.02, 0.04, 0.1))


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf"), -1.0])
def test_a_scale_that_cannot_be_divided_by_is_refused(scale: float) -> None:
    setup = QuantizationSetup({}, "float32", "cpu", REFERENCES, rounding="checkpoint")
    layer = LinearLayer("a", 32, 4, (Part("a.weight", (0, 4)),))
    weight = Method(setup).linear(layer)
    assert weight is not None
    with pytest.raises(ModelError, match=r"a\.input_scale is"):
        load_pieces(weight, pieces_of(scale, 1, 1)[:3])


class Shifted(Method):
    """Stored scales have zero points."""

    def rounding(self, module: str, layer: AnyLayer) -> AskedRounding | None:
        return AskedRounding("int8", is_static=True, is_symmetric=False)


def test_merged_layers_share_a_scale_that_holds_the_values_of_both() -> None:
    """One from -1 to 4.1, one from -3 to 2.1: together from -3 to 4.1."""
    parts = tuple(Part(f"{name}.weight", (4 * i, 4 * i + 4)) for i, name in enumerate("ab"))
    setup = QuantizationSetup({}, "float32", "cpu", REFERENCES, rounding="checkpoint")
    weight = Shifted(setup).linear(LinearLayer("ab", 32, 8, parts))
    assert weight is not None
    zeros = stored_pieces("a", {"input_zero_point": torch.tensor([-78], dtype=torch.int32)})
    zeros += stored_pieces("b", {"input_zero_point": torch.tensor([22], dtype=torch.int32)})
    load_pieces(weight, pieces_of(0.02, 0.02) + zeros)
    (span,) = weight.spans
    assert span.rounding is not None and span.rounding.scale == pytest.approx(7.1 / 255)
    assert span.rounding.zero == round(-128 + 3 / (7.1 / 255))
    x = torch.randn(3, 32)
    expected = span.rounding.rounded(x) @ weight.dequantize().T
    torch.testing.assert_close(weight.bind(REFERENCES)(x), expected)


def test_the_log_names_what_shares_a_scale() -> None:
    assert str(AskedRounding("int8", is_shared=True)) == "int8 with a scale per step"
    shifted = AskedRounding("int8", is_static=True, is_symmetric=False)
    assert str(shifted) == "int8 with a stored scale and zero points"
