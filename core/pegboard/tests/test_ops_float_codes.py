"""Float codes mean value times scale, for every small float type, kind of scale and block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pegboard.ops import REFERENCES
from pegboard.ops.float_codes import E2M1, CodeWeight, FloatCodes, float8_values, minifloat_values
from pegboard_testing.held_memory import held_bytes


def defined(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Return the value of a finite code by the definition: sign, exponent, mantissa."""
    mantissa = code % 2**mantissa_bits
    exponent = code >> mantissa_bits & (2**exponent_bits - 1)
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
    return sign * (mantissa / 2**mantissa_bits + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)


@pytest.mark.parametrize(
    ("name", "exponent", "mantissa", "bias", "special"),
    [
        ("float8_e4m3fn", 4, 3, 7, {0x7F: "nan", 0xFF: "nan"}),
        (
            "float8_e5m2",
            5,
            2,
            15,
            {
                s + c: v
                for s in (0, 128)
                for c, v in ((0x7C, "inf"), (0x7D, "nan"), (0x7E, "nan"), (0x7F, "nan"))
            },
        ),
        ("float8_e4m3fnuz", 4, 3, 8, {0x80: "nan"}),
        ("float8_e5m2fnuz", 5, 2, 16, {0x80: "nan"}),
    ],
)
def test_values_of_8_bits(
    name: str, exponent: int, mantissa: int, bias: int, special: dict[int, str]
) -> None:
    found = float8_values(getattr(torch, name))
    for code in range(256):
        expected = (
            float(special[code]) if code in special else defined(code, exponent, mantissa, bias)
        )
        expected *= -1 if special.get(code) == "inf" and code > 127 else 1
        assert found[code].item() == expected or (np.isnan(expected) and found[code].isnan())


@pytest.mark.parametrize(("exponent", "mantissa"), [(2, 1), (3, 2), (2, 3)])
def test_values_of_fewer_bits(exponent: int, mantissa: int) -> None:
    found = minifloat_values(exponent, mantissa).tolist()
    bias = 2 ** (exponent - 1) - 1
    assert found == [
        defined(code, exponent, mantissa, bias) for code in range(2 ** (1 + exponent + mantissa))
    ]


def random_codes(
    rows: int,
    columns: int,
    block: tuple[int, int],
    values: Tensor,
    scale: torch.dtype = torch.float32,
    seed: int = 0,
) -> FloatCodes:
    """Make random codes of finite values."""
    generator = torch.Generator().manual_seed(seed)
    finite = values.isfinite().nonzero().flatten().to(torch.uint8)
    codes = finite[torch.randint(0, len(finite), (rows, columns), generator=generator)]
    shape = -(-rows // block[0]), -(-columns // block[1])
    scales = (torch.rand(shape, generator=generator) + 0.01).to(scale)
    return FloatCodes(codes, values, scales, block, 0.37)


@settings(max_examples=30, deadline=None)
@given(
    values=st.sampled_from([E2M1, float8_values(torch.float8_e4m3fn), torch.linspace(-1, 3, 16)]),
    scale=st.sampled_from(
        [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu]
    ),
    block=st.sampled_from([(1, 16), (1, 96), (5, 96), (2, 32), (3, 50), (128, 128)]),
    rows=st.integers(1, 7),
)
def test_values_follow_the_formula(
    values: Tensor, scale: torch.dtype, block: tuple[int, int], rows: int
) -> None:
    codes = random_codes(rows, 96, block, values, scale)
    found = codes.dense()
    assert found.shape == (rows, 96) and found.dtype == torch.float32
    for row in range(rows):
        for column in range(96):
            factor = np.float32(
                float(codes.scale[row // block[0], column // block[1]].float()) * codes.factor
            )
            assert (
                float(found[row, column])
                == np.float32(values[codes.codes[row, column].item()].item()) * factor
            )


def test_a_global_scale_that_divides_is_exact() -> None:
    scale = torch.tensor([[3.5, 448.0]]).to(torch.float8_e4m3fn)
    for divisor in np.random.default_rng(0).random(200, np.float32) * 900:
        codes = FloatCodes(
            torch.full((1, 32), 2, dtype=torch.uint8), E2M1, scale, (1, 16), 1 / float(divisor)
        )
        assert np.array_equal(
            codes.dense()[0, ::16].numpy(), np.float32([3.5, 448]) / np.float32(divisor)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_of_two_forms_is_looked_up_multiplied_and_reloaded(dtype: torch.dtype) -> None:
    weight = REFERENCES["code_weight"]((40, 64), dtype, "cpu", is_table=True)
    assert isinstance(weight, CodeWeight) and not weight.restore()
    parts = [
        random_codes(30, 64, (1, 64), float8_values(torch.float8_e4m3fn)),
        random_codes(8, 64, (1, 16), E2M1),
    ]
    weight.write(0, parts[0])
    weight.write(30, parts[1])
    weight.finish()
    table = torch.cat([*(part.dense() for part in parts), torch.zeros(2, 64)]).to(dtype)
    call = weight.bind()
    look_up = weight.bind_lookup()
    x = torch.randn(3, 64).to(dtype)
    assert torch.equal(look_up(torch.arange(40)), table)
    torch.testing.assert_close(
        call(x), x @ table.T, rtol=2e-2, atol=1e-3 * float(table.abs().max()) * 64
    )
    weight.write(30, random_codes(8, 64, (1, 16), E2M1, seed=1))
    weight.finish()
    table[30:38] = random_codes(8, 64, (1, 16), E2M1, seed=1).dense()
    assert (
        torch.equal(look_up(torch.arange(40)), table)
        and held_bytes(weight) >= 40 * 64 * dtype.itemsize
    )
