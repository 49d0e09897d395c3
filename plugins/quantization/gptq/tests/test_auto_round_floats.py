"""AutoRound checkpoints in small floats, which the tests write as AutoRound defines them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pegboard_quantization_gptq.auto_round import AutoRound
from pegboard_quantization_gptq.plugin import AUTO_ROUND
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import LinearLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.ops import REFERENCES
from pegboard_testing.contract_quantization import (
    QuantizationContract,
    load_pieces,
    stored_pieces,
)
from pegboard_testing.layouts import FP4
from pegboard_weights.asked_rounding import AskedRounding
from pegboard_weights.stored_weight import StoredWeight

ROWS = 8
COLUMNS = 256
FP8 = {"data_type": "fp", "bits": 8, "act_bits": 8, "act_data_type": "fp"}


def method(**config: Any) -> AutoRound:
    values = {"quant_method": "auto-round", "sym": True, **config}
    setup = QuantizationSetup(values, "float32", "cpu", REFERENCES, rounding="checkpoint")
    return AutoRound(None, setup)


def layer(module: str = "up", columns: int = COLUMNS) -> LinearLayer:
    return LinearLayer(module, columns, ROWS, (Part(f"{module}.weight", (0, ROWS)),))


class Drawn:
    """Random codes of a matrix [rows, columns]."""

    def __init__(self, rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> None:
        self.rows = rows
        self.columns = columns
        self._generator = torch.Generator().manual_seed(seed)

    def bytes(self, size: int = 1, most: int = 256, least: int = 0) -> Tensor:
        """Return one byte for each `size` columns."""
        shape = self.rows, self.columns // size
        return torch.randint(least, most, shape, generator=self._generator).to(torch.uint8)

    def exponents(self) -> tuple[Tensor, Tensor]:
        """Return scales as they are stored, and what they mean for each column."""
        stored = self.bytes(32, most=130, least=120)
        return stored, torch.exp2(stored.float() - 127).repeat_interleave(32, 1)

    def float8(self) -> Tensor:
        return (self.bytes(most=120).int() - 60).float().to(torch.float8_e4m3fn)


def of_pairs(packed: Tensor, table: Tensor) -> Tensor:
    """Return the values of two codes per byte, the lower half first."""
    return table[torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()]


def mx_fp4(drawn: Drawn) -> tuple[dict[str, Tensor], Tensor]:
    packed = drawn.bytes(2)
    stored, scales = drawn.exponents()
    values = of_pairs(packed, torch.as_tensor(FP4, dtype=torch.float32)) * scales
    return {"weight_packed": packed, "weight_scale": stored}, values


def mx_int4(drawn: Drawn) -> tuple[dict[str, Tensor], Tensor]:
    packed = drawn.bytes(2)
    stored, scales = drawn.exponents()
    table = torch.tensor([sign * step / 4 for sign in (1, -1) for step in range(8)])
    return {"weight_packed": packed, "weight_scale": stored}, of_pairs(packed, table) * scales


def mx_fp8(drawn: Drawn) -> tuple[dict[str, Tensor], Tensor]:
    codes = drawn.float8()
    stored, scales = drawn.exponents()
    return {"weight": codes, "weight_scale": stored}, codes.float() * scales


def nv_fp4(drawn: Drawn) -> tuple[dict[str, Tensor], Tensor]:
    packed = drawn.bytes(2)
    stored = (drawn.bytes(16, most=99) + 1).float().to(torch.float8_e4m3fn)
    scales = (stored.float() / 512).repeat_interleave(16, 1)
    values = of_pairs(packed, torch.as_tensor(FP4, dtype=torch.float32)) * scales
    whole = torch.tensor([512.0])
    return {"weight_packed": packed, "weight_scale": stored, "weight_global_scale": whole}, values


def fp8_rows(drawn: Drawn) -> tuple[dict[str, Tensor], Tensor]:
    codes = drawn.float8()
    scales = torch.linspace(0.25, 2, drawn.rows)
    stored = {"weight": codes, "weight_scale": scales, "input_scale": torch.tensor([0.125])}
    return stored, codes.float() * scales.unsqueeze(1)


def fp8_blocks(drawn: Drawn) -> tuple[dict[str, Tensor], Tensor]:
    codes = drawn.float8()
    scales = torch.tensor([[0.5, 3.0]])
    values = codes.float() * scales.repeat_interleave(128, 1)
    return {"weight": codes, "weight_scale_inv": scales}, values


CASES: dict[str, tuple[dict[str, Any], Any, AskedRounding | None]] = {
    "MXFP4": (
        {"data_type": "mx_fp", "bits": 4, "group_size": 32, "act_bits": 4},
        mx_fp4,
        None,
    ),
    "MXFP4_RCEIL": (
        {"data_type": "mx_fp_rceil", "bits": 4, "packing_format": "auto_round:llm_compressor"},
        mx_fp4,
        None,
    ),
    "MXFP8": ({"data_type": "mx_fp", "bits": 8, "group_size": 32}, mx_fp8, None),
    "MXINT4": ({"data_type": "mx_int", "bits": 4, "packing_format": "auto_round"}, mx_int4, None),
    "NVFP4": (
        {"data_type": "nv_fp", "bits": 4, "act_data_type": "nv_fp4_with_static_gs"},
        nv_fp4,
        None,
    ),
    "FP8_STATIC": (
        {
            **FP8,
            "group_size": -1,
            "act_group_size": 0,
            "act_dynamic": False,
            "packing_format": "auto_round:fp8_static",
        },
        fp8_rows,
        AskedRounding("float8_e4m3fn", is_static=True),
    ),
    "FP8_BLOCK": (
        {**FP8, "group_size": [128, 128], "act_group_size": 128, "act_dynamic": True},
        fp8_blocks,
        AskedRounding("float8_e4m3fn", 128),
    ),
}


class TestAutoRoundMXFP4(QuantizationContract):
    spec = AUTO_ROUND
    block = 32
    case = "MXFP4"

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        return {"quant_method": "auto-round", "sym": True, **CASES[self.case][0]}

    def method(self, setup: QuantizationSetup) -> AutoRound:
        return AutoRound(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        compute = getattr(torch, dtype)
        if part.name.startswith("model.embed"):
            return stored_pieces("model.embed", {"weight": values}), values.to(compute).float()
        seed = abs(int(values[0, 0] * 1e6))
        tensors, exact = CASES[self.case][1](Drawn(*values.shape, seed))
        return stored_pieces(part.name.removesuffix(".weight"), tensors), exact.to(compute).float()


class TestAutoRoundMXFP8(TestAutoRoundMXFP4):
    case = "MXFP8"


class TestAutoRoundMXINT4(TestAutoRoundMXFP4):
    case = "MXINT4"


class TestAutoRoundNVFP4(TestAutoRoundMXFP4):
    case = "NVFP4"


@pytest.mark.parametrize("case", CASES)
def test_schemes_that_are_exported(case: str) -> None:
    """The weights, and the product with activations that are rounded as the scheme says."""
    config, make, asked = CASES[case]
    found = method(**config)
    tensors, values = make(Drawn())
    weight = found.linear(layer())
    assert isinstance(weight, StoredWeight)
    load_pieces(weight, stored_pieces("up", tensors))
    assert torch.equal(weight.dequantize(), values)
    assert found.rounding("up", layer()) == asked
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1))
    rounding = asked and asked.rounding([[0.125]] if asked.is_static else [])
    expected = (rounding.rounded(x) if rounding else x) @ values.T
    torch.testing.assert_close(weight.bind(REFERENCES)(x), expected, rtol=1e-4, atol=1e-3)


def test_mixed_bits() -> None:
    """Modules of FP4 and of FP8 in a checkpoint, and plain ones."""
    extra = {"up": {"bits": 8}, "down": {"bits": 16, "data_type": "fp"}}
    found = method(data_type="mx_fp", bits=4, group_size=32, extra_config=extra)
    for module, make in (("up", mx_fp8), ("gate", mx_fp4)):
        tensors, values = make(Drawn())
        weight = found.linear(layer(module))
        assert weight is not None
        load_pieces(weight, stored_pieces(module, tensors))
        assert torch.equal(weight.dequantize(), values)
    assert found.linear(layer("down")) is None
    with pytest.raises(ModelError, match="up has 80 columns, which are not groups of 32"):
        found.linear(layer("up", 80))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"act_dynamic": True, "act_group_size": -1}, AskedRounding("float8_e4m3fn")),
        (
            {"act_dynamic": True, "act_group_size": 0},
            AskedRounding("float8_e4m3fn", is_shared=True),
        ),
        ({"act_dynamic": True, "act_group_size": 48}, None),
        ({"act_dynamic": False, "act_group_size": -1}, None),
        ({"act_bits": 16, "act_group_size": 0}, None),
    ],
)
def test_how_activations_are_rounded(
    changes: dict[str, Any], expected: AskedRounding | None
) -> None:
    assert method(**{**FP8, **changes}).rounding("up", layer()) == expected
