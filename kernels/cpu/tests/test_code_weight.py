"""Packed float codes, compared with their reference: all codes, kinds of scales and blocks, few and
many tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kernel_cpu.code_weight import NativeCodeWeight
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.repack import store_packed
from pegboard_kernel_cpu.replay import NativeReplay
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import RepackCache, RepackEntry
from pegboard.ops.float_codes import (
    E2M1,
    CodeWeight,
    FloatCodes,
)
from pegboard_testing.held_memory import held_bytes
from pegboard_testing.stored_rows import BLOCKS, CODED, SCALES, VALUES, codes_of

pytestmark = pytest.mark.usefixtures("native")

TOKENS = [1, 2, 3, 4, 5, 11, 13, 16, 17, 97]


def filled(
    kind: type, shape: tuple[int, int], *parts: FloatCodes, **kwargs: object
) -> NativeCodeWeight:
    weight = kind(shape, torch.float32, "cpu", **kwargs)
    start = 0
    for part in parts:
        weight.write(start, part)
        start += len(part.codes)
    weight.finish()
    return weight


def rounds(num_tokens: int) -> bool:
    return num_tokens >= library().constant("codes_rounded_from")


def rounded(x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as they are multiplied."""
    if not rounds(len(x)):
        return x, matrix
    return x.bfloat16().float(), matrix.bfloat16().float()


def check(found: Tensor, x: Tensor, matrix: Tensor) -> None:
    """Additions are in another order. A weight in the middle between two bfloat16 numbers may be
    rounded to either."""
    error = 1e-3 if rounds(len(x)) else 1e-5
    bound = error * float((x.abs() @ matrix.abs().T).max())
    of_x, of_matrix = rounded(x, matrix)
    torch.testing.assert_close(found, of_x @ of_matrix.T, rtol=0, atol=bound)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(sorted(VALUES)),
    st.sampled_from(sorted(VALUES)),
    st.sampled_from(SCALES),
    st.sampled_from(SCALES),
    st.sampled_from(BLOCKS),
    st.integers(1, 70),
    st.integers(1, 40),
    st.sampled_from([32, 96, 288, 512]),
    st.sampled_from(TOKENS),
    st.integers(0, 99),
)
def test_products_and_values(
    first: str,
    second: str,
    scale: torch.dtype,
    other: torch.dtype,
    block: tuple[int, int],
    rows: int,
    more: int,
    columns: int,
    count: int,
    seed: int,
) -> None:
    parts = [
        codes_of(first, scale, block, rows, columns, seed),
        codes_of(second, other, block, more, columns, seed + 1),
    ]
    shape = (rows + more + 3, columns)  # and some rows that are not written
    native = filled(NativeCodeWeight, shape, *parts)
    reference = filled(CodeWeight, shape, *parts)
    matrix = reference.dense()
    torch.testing.assert_close(native.dense(), matrix, rtol=1e-6, atol=0)
    x = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))
    check(native.bind()(x), x, matrix)


@pytest.mark.parametrize("values", sorted(VALUES))
def test_every_format_with_few_and_many_tokens(values: str) -> None:
    codes = codes_of(values, torch.float8_e4m3fn, (1, 16), 40, 96, 1)
    weight = filled(NativeCodeWeight, (40, 96), codes)
    for count in (1, 2, 40):
        x = torch.randn(count, 96)
        check(weight.bind()(x), x, codes.dense())
    packed = 40 * 96 * (8 if len(VALUES[values]) > 16 else 4) // 8 + 40 * 96 // 16
    assert held_bytes(weight) <= 48 / 40 * packed + 64, "codes and scales stay as they are stored"


@pytest.mark.parametrize(
    ("values", "scale", "block"),
    [
        ("e2m1", torch.float8_e4m3fn, (1, 16)),
        ("e4m3fn", torch.float8_e4m3fn, (1, 32)),
        ("e5m2", torch.float8_e8m0fnu, (1, 32)),
        ("e4m3fn", torch.float32, (128, 128)),
        ("e2m1", torch.float32, (1, 10_000)),
        ("e2m1", torch.float32, (1, 48)),
        ("nf4", torch.float32, (1, 64)),
        ("nf4", torch.float16, (1, 32)),
        ("e2m1", CODED, (1, 64)),
        ("e4m3fn", CODED, (1, 32)),
    ],
)
def test_a_token_with_one_activation_gives_a_column_of_the_matrix(
    values: str, scale: torch.dtype, block: tuple[int, int]
) -> None:
    columns = 576
    codes = codes_of(values, scale, block, 50, columns, 3)
    weight = filled(NativeCodeWeight, (50, columns), codes)
    matrix = codes.dense()
    for count in (13, 32, 49, 115):
        x = torch.randn(count, columns, generator=torch.Generator().manual_seed(count))
        check(weight.bind()(x), x, matrix)
        at = torch.arange(count) * 5 % columns
        x = torch.zeros_like(x).scatter_(1, at.unsqueeze(1), x)
        of_x, of_matrix = rounded(x, matrix)
        expected = of_x.double().sum(1, keepdim=True) * of_matrix.T[at]
        error = 2**-7 if rounds(count) else 5e-7
        torch.testing.assert_close(weight.bind()(x).double(), expected, rtol=error, atol=0)


@pytest.mark.parametrize("values", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_all_256_codes(values: str) -> None:
    """NaN stays NaN and infinities stay infinite."""
    rows = torch.arange(256, dtype=torch.uint8).view(8, 32)
    codes = FloatCodes(rows, VALUES[values], torch.full((1, 1), 0.5), (8, 32))
    weight = filled(NativeCodeWeight, (8, 32), codes)
    torch.testing.assert_close(weight.dense(), codes.dense(), rtol=0, atol=0, equal_nan=True)
    for column in range(32):
        x = torch.zeros(1, 32)
        x[0, column] = 2
        finite = codes.dense().isfinite().all(1)
        assert torch.equal(weight.bind()(x)[0][finite], VALUES[values].view(8, 32)[finite, column])
        assert not weight.bind()(torch.ones(1, 32))[0][~finite].isfinite().any()


def test_all_codes_of_a_scale() -> None:
    for scale in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        scales = torch.arange(256, dtype=torch.uint8).view(scale).view(16, 16)
        codes = FloatCodes(torch.full((16, 256), 2, dtype=torch.uint8), E2M1, scales, (1, 16))
        weight = filled(NativeCodeWeight, (16, 256), codes)
        torch.testing.assert_close(weight.dense(), codes.dense(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("values", ["e4m3fn", "e2m1", "table"])
def test_a_table_is_looked_up_and_multiplied(values: str) -> None:
    codes = codes_of(values, torch.float32, (1, 64), 30, 64, 2)
    table = filled(NativeCodeWeight, (40, 64), codes, is_table=True)
    ids = torch.tensor([29, 0, 3, 3, 35])
    expected = torch.zeros(40, 64)
    expected[:30] = codes.dense()
    torch.testing.assert_close(table.bind_lookup()(ids), expected[ids], rtol=1e-6, atol=0)
    x = torch.randn(5, 64)
    check(table.bind()(x), x, expected)


@pytest.mark.parametrize(
    ("values", "scale"),
    [("e2m1", torch.float8_e4m3fn), ("e4m3fn", torch.float32), ("nf4", torch.float16)],
)
def test_a_reload_is_seen_by_what_was_bound(values: str, scale: torch.dtype) -> None:
    """Also if the parts have other factors."""
    weight = filled(
        NativeCodeWeight,
        (40, 64),
        *(codes_of(values, scale, (1, 16), 20, 64, seed) for seed in (0, 1)),
    )
    bound = weight.bind()
    x = torch.randn(4, 64)
    new = [codes_of(values, scale, (1, 16), 20, 64, seed) for seed in (2, 3)]
    new[1] = FloatCodes(new[1].codes, new[1].values, new[1].scale, new[1].block, 0.2)
    for start, part in zip((0, 20), new, strict=True):
        weight.write(start, part)
    weight.finish()
    check(bound(x), x, torch.cat([part.dense() for part in new]))
    with pytest.raises(ModelError, match="a reload must not change the format"):
        weight.write(0, codes_of("e5m2", scale, (1, 16), 20, 64, 0))
        weight.finish()


def test_a_reload_as_another_float8_type_is_refused() -> None:
    """The rows share a factor with others."""
    weight = filled(
        NativeCodeWeight,
        (40, 64),
        *(codes_of("e4m3fn", torch.float32, (1, 64), 20, 64, seed) for seed in (0, 1)),
    )
    weight.write(20, codes_of("e4m3fnuz", torch.float32, (1, 64), 20, 64, 0))
    with pytest.raises(ModelError, match="a reload must not change the format"):
        weight.finish()


def test_a_recording_equals_the_eager_call() -> None:
    """Also with a bias, which the kernels add to parts in several formats."""
    parts = [
        codes_of("e4m3fn", torch.float32, (1, 96), 33, 96, 0),
        codes_of("e2m1", torch.float8_e4m3fn, (1, 16), 15, 96, 1),
    ]
    multiply = filled(NativeCodeWeight, (48, 96), *parts).bind()
    bias = torch.randn(48)
    x = torch.randn(20, 96)
    program = NativeReplay().record(lambda hidden: (multiply(hidden).add_(bias),), [x])
    for count in (1, 2, 20):
        # the bias is added first
        expected = multiply(x[:count]) + bias
        torch.testing.assert_close(program(count)[0], expected, atol=1e-4, rtol=1e-5)


def test_a_kept_layout_is_the_weight(tmp_path: Path) -> None:
    def entry() -> RepackEntry:  # as when the engine starts
        return RepackCache(tmp_path, "sha256:1", 1 << 20).entry("layers.0", {})

    kinds: list[tuple[str, torch.dtype]] = [
        ("nf4", torch.float32),
        ("e4m3fn", torch.float8_e8m0fnu),
        ("nf4", CODED),
    ]
    parts = [
        codes_of(values, scale, (1, 32), 15 + at, 96, at)
        for at, (values, scale) in enumerate(kinds)
    ]
    first = filled(NativeCodeWeight, (48, 96), *parts, cache=entry())
    second = NativeCodeWeight((48, 96), torch.float32, "cpu", cache=entry())
    assert second.restore() and torch.equal(first.dense(), second.dense())
    x = torch.randn(7, 96)
    assert torch.equal(first.bind()(x), second.bind()(x))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (0, -1),
            (1, 41),
            (2, 5),
            (2, "8"),
            (3, 3),
            (4, 6),
            (4, 2),
            (5, 0),
            (5, 24),
            (5, 128),
            (6, 1),
            (8, "1"),
            (9, "1"),
        ),
        *((10, [0.0] * 15), (10, "x" * 16), (11, [0.0]), (11, 7)),
    ],
)
def test_a_hostile_header_is_not_used(tmp_path: Path, field: int, value: object) -> None:
    """Such a file has right checksums: only another program of the same user can have written
    it."""
    cache = RepackCache(tmp_path, "sha256:1", 1 << 20)
    run = [0, 40, 4, 0, 4, 16, 0, 0, 1.0, 0.0, [0.0] * 16, []]
    memory = memoryview(bytes(48 * 96 // 2 + 48 * 6 + 32))
    weight = NativeCodeWeight((40, 96), torch.float32, "cpu", cache=cache.entry("layers.0", {}))
    store_packed(cache.entry("layers.0", {}), NativeCodeWeight.LAYOUT, memory, {"runs": [run]})
    assert weight.restore(), "the test stores what the weight stores"
    run[field] = value
    store_packed(cache.entry("layers.0", {}), NativeCodeWeight.LAYOUT, memory, {"runs": [run]})
    assert not weight.restore()


def test_blocks_that_no_kernel_computes_are_refused() -> None:
    weight = NativeCodeWeight((4, 96), torch.float32, "cpu")
    with pytest.raises(ModelError, match="scales of 24 columns are not computed for 96 columns"):
        weight.write(0, codes_of("e2m1", torch.float32, (1, 24), 4, 96, 0))
    with pytest.raises(ModelError, match="multiple of 32 columns, not 48"):
        NativeCodeWeight((4, 48), torch.float32, "cpu")
