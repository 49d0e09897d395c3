"""Products of codes with codes (W8A8) under Triton's interpreter, compared with the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pegboard_kernel_triton import rounded_product
from pegboard_kernel_triton.packed_weight import TritonBlockWeight, TritonCodeWeight

from pegboard.ops.blocks import Blocks, BlockWeight
from pegboard.ops.float_codes import CodeWeight, FloatCodes, float8_values
from pegboard.ops.rounding import Rounding

pytestmark = pytest.mark.usefixtures("interpreted_triton")
SOME = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
INT8, FLOAT8 = "int8", "float8_e4m3fn"


def integers(rows: int, columns: int, block: int, seed: int) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=generator)
    scale = torch.rand(rows, columns // block, generator=generator) * 0.01 + 0.001
    return Blocks(8, block, codes, scale.half())


def floats(rows: int, columns: int, block: tuple[int, int], seed: int) -> FloatCodes:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * 20
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    shape = (-(-rows // block[0]), -(-columns // block[1]))
    scale = torch.rand(shape, generator=generator) * 0.01 + 0.001
    return FloatCodes(codes, float8_values(torch.float8_e4m3fn), scale, block, 0.3)


def weights(rounding: Rounding, *parts: Any, padding: int = 0) -> list[Any]:
    """Return a weight of these parts, and its reference."""
    rows = sum(len(part.codes) for part in parts) + padding
    pairs = {
        Blocks: (TritonBlockWeight, BlockWeight),
        FloatCodes: (TritonCodeWeight, CodeWeight),
    }
    made = []
    for kind in pairs[type(parts[0])]:
        shape = (rows, parts[0].codes.shape[1])
        weight = kind(shape, torch.float32, "cpu", rounding=rounding)
        start = 0
        for part in parts:
            weight.write(start, part)
            start += len(part.codes)
        weight.finish()
        made.append(weight)
    return made


def check(weight: Any, reference: Any, x: torch.Tensor) -> None:
    product = weight.bind()(x)
    assert product.dtype == x.dtype
    matrix = reference.dense()
    expected = weight.rounding.rounded(x.float()) @ matrix.T
    bound = TOLERANCES[x.dtype] * float((x.float().abs() @ matrix.abs().T).max())
    torch.testing.assert_close(product.float(), expected, rtol=0, atol=bound)
    if x.dtype == torch.float32:
        torch.testing.assert_close(product, reference.bind()(x), rtol=0, atol=bound)


@SOME
@given(
    st.sampled_from((INT8, FLOAT8)),
    st.sampled_from((0, 128)),
    st.sampled_from((None, 0.02)),
    st.sampled_from((128, 256)),
    st.integers(1, 40),
    st.sampled_from((1, 3, 17)),
    st.sampled_from(list(TOLERANCES)),
    st.integers(0, 99),
)
def test_codes_are_multiplied_with_codes(
    kind: str,
    group: int,
    scale: float | None,
    block: int,
    rows: int,
    count: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Merged parts, rows without weights, scales per token, per group and given, few and many
    tokens, and x in a wider tensor."""
    rounding = Rounding(kind, group, scale)
    if kind == INT8:
        parts = (integers(rows, 256, block, seed), integers(5, 256, block, seed + 1))
    else:
        parts = (floats(rows, 256, (1, block), seed), floats(5, 256, (1, block), seed + 1))
    weight, reference = weights(rounding, *parts, padding=2)
    assert all(rounded_product.has_codes(each.packed, rounding) for each in weight.segments)
    x = torch.randn(count, 261, generator=torch.Generator().manual_seed(seed))
    check(weight, reference, x[:, :256].to(dtype))


@pytest.mark.parametrize("kind", [INT8, FLOAT8])
@pytest.mark.parametrize("group", [0, 96, 128])
def test_codes_are_those_of_the_reference(kind: str, group: int) -> None:
    """Also of zeros, large and small numbers, and a last group that is not whole."""
    x = torch.randn(5, 320) * torch.tensor([[1.0], [1e-3], [1e4], [0.0], [1.0]])
    for rounding in (Rounding(kind, group), Rounding(kind, group, 0.01)):
        codes, scales = rounded_product.round_rows(x, rounding)
        expected, expected_scales, _ = rounding.quantize(x)
        torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
        actual = codes if kind == INT8 else codes.view(torch.float8_e4m3fn)
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [INT8, FLOAT8])
def test_other_forms_round_what_they_multiply(kind: str) -> None:
    """Columns that do not fill tiles, blocks that are smaller, and minimums."""
    rounding = Rounding(kind)
    parts = [integers(7, 192, 192, 3), integers(7, 256, 64, 3), floats(7, 128, (1, 32), 3)]
    for part in parts:
        weight, reference = weights(rounding, part)
        assert not rounded_product.has_codes(weight.segments[0].packed, rounding)
        check(weight, reference, torch.randn(3, part.codes.shape[1]))


def test_experts_round_what_they_multiply() -> None:
    rounding = Rounding(INT8)
    weight, reference = weights(rounding, integers(12, 128, 128, 3))
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    x = torch.randn(5, 128)
    products = [each.bind_experts(3, None)(x, starts) for each in (weight, reference)]
    torch.testing.assert_close(*products, rtol=1e-5, atol=1e-5)


def test_what_devices_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 needs compute capability 8.9, and AMD's third generation has another type."""
    multiplies = rounded_product.multiplies.__wrapped__
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((8, 0), (True, False)), ((8, 9), (True, True))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        assert (multiplies(INT8), multiplies(FLOAT8)) == expected
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert (multiplies(INT8), multiplies(FLOAT8)) == (True, False)
